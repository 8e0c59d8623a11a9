"""Which images may be answered: by a threshold, or by a risk that needs no labels."""

import math
from typing import Any

import pytest
import torch

import undrift
from undrift import Prediction


def sure_of(*confidences: float) -> Prediction:
    """Return a prediction of two classes with these confidences; NaN has no answer."""
    sure = torch.tensor(confidences)
    return Prediction.of(torch.stack((sure, 1 - sure), 1))


def test_as_many_are_answered_as_the_expected_error_allows() -> None:
    p = sure_of(0.5, 1.0, 0.75, 0.875)  # in order: expected errors 0, 1/16, 1/8, 7/32
    assert p.certain(risk=0.0).tolist() == [False, True, False, False]
    assert p.certain(risk=0.0624).tolist() == [False, True, False, False]
    assert p.certain(risk=0.0625).tolist() == [False, True, False, True]
    assert p.certain(risk=0.125).tolist() == [False, True, True, True]
    assert p.certain(risk=1).all()
    assert not sure_of(0.75, 0.875).certain(risk=0.1).any()
    assert len(Prediction.of(torch.empty(0, 3)).certain(risk=0.1)) == 0


def test_equal_confidences_are_answered_all_or_none() -> None:
    # 1, then two of 3/4: the first of these would leave 1/8, both make it 1/6.
    assert sure_of(0.75, 1.0, 0.75).certain(risk=0.125).tolist() == [False, True, False]
    assert sure_of(0.75, 1.0, 0.75).certain(risk=0.17).all()


def test_images_without_an_answer_take_no_part_in_the_expected_error() -> None:
    p = sure_of(math.nan, 0.75, math.nan, 0.875)
    assert p.certain(risk=0.1875).tolist() == [False, True, False, True]
    assert p.certain(risk=1.0).tolist() == [False, True, False, True]
    assert not sure_of(math.nan).certain(risk=1.0).any()


def test_the_expected_error_is_the_true_one_where_probabilities_are_calibrated() -> None:
    drawn = torch.Generator().manual_seed(0)
    probs = torch.randn(20_000, 5, generator=drawn).mul(2).softmax(1)
    truth = probs.multinomial(1, generator=drawn)[:, 0]
    p = Prediction.of(probs)
    for risk in (0.05, 0.1, 0.2):
        act = p.certain(risk=risk)
        assert act.sum() > 1000
        assert float((p.label != truth)[act].float().mean()) == pytest.approx(risk, abs=0.015)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({}, r"neither threshold nor risk; needed: one of them. Give"),
        ({"threshold": 0.8, "risk": 0.1}, r"threshold=0.8 and risk=0.1; needed: one of them. Give"),
        ({"risk": 5}, r"risk=5 is not from 0 to 1; needed.*5 %"),
        ({"risk": math.nan}, r"risk=nan is not from 0 to 1"),
        ({"risk": True}, r"risk=True"),
        ({"risk": "low"}, r"risk='low' is not from 0 to 1"),
        ({"threshold": 70}, r"threshold=70 is not a number from 0 to 1; needed.*80 %"),
        ({"threshold": "high"}, r"threshold='high' is not a number"),
    ],
)
def test_what_certain_refuses(given: dict[str, Any], match: str) -> None:
    with pytest.raises(undrift.OptionError, match=match):
        sure_of(0.9).certain(**given)
