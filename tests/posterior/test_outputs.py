"""Classifiers return their logits in many wrappings; what is no classifier's output is refused."""

from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch

import undrift
from undrift.posterior.outputs import logits

Z = torch.randn(4, 3)


@pytest.mark.parametrize(
    "output",
    [
        Z,
        (Z, "aux"),
        [Z, torch.zeros(4, 7)],
        {"logits": Z, "loss": None},
        SimpleNamespace(logits=Z),
        namedtuple("Output", ["aux", "logits"])(torch.zeros(4, 7), Z),
    ],
)
def test_logits_are_found(output: object) -> None:
    assert logits(output) is Z


def test_half_precision_is_read_in_float32() -> None:
    assert logits(Z.bfloat16()).dtype == torch.float32
    assert logits(Z.double()).dtype == torch.float64


@pytest.mark.parametrize(
    ("output", "what"),
    [
        (torch.zeros(2, 3, 8, 8), r"\(2, 3, 8, 8\) \(a dense map\).*Pool"),
        (torch.zeros(4, 1), r"\(4, 1\).*regression.*at least two"),
        (torch.zeros(5), r"shape \(5,\).*images\[None\]"),
        (torch.zeros(4, 3, dtype=torch.int64), "int64.*before the arg max"),
        ({"out": Z}, "a dict with 'out'.*logits"),
        ({}, "no entries"),
        ((), "a tuple"),
        (None, "a NoneType"),
        ("cat", "a str"),
        (SimpleNamespace(boxes=Z), "a SimpleNamespace"),
    ],
)
def test_what_is_not_a_classifiers_output_is_refused(output: object, what: str) -> None:
    with pytest.raises(undrift.OutputError, match=what) as caught:
        logits(output)
    assert "batch × classes" in str(caught.value)
