"""The scores of a report: computed by hand, by brute force over orders, and by torchmetrics."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torchmetrics.functional.classification import multiclass_calibration_error

import undrift

PROBS = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.65, 0.25], [0.5, 0.3, 0.2], [0.0, 0.1, 0.9]])
LABELS = torch.tensor([0, 2, 0, 2])  # right, wrong, right, right
# In order of confidence: right, wrong, right, wrong.
CONFIDENCE = torch.tensor([0.5, 0.9, 0.6, 0.8])
RIGHT = torch.tensor([False, True, True, False])


def logits(probs: Tensor) -> Tensor:
    return probs.log().clamp_min(-200)  # an infinite one would be no answer


def result(probs: Tensor, labels: Tensor, batch: int = 1000):  # type: ignore[no-untyped-def]
    """Return the result of a network that answers with these probabilities."""
    data = list(zip(logits(probs).split(batch), labels.split(batch), strict=True))
    return undrift.evaluate(nn.Identity(), data).results[0]


def areas(confidence: Tensor, right: Tensor) -> tuple[float, float]:
    """Return AURC and AUGRC of answers of these confidences; the rest of each is shared by classes that are wrong."""
    others = ((1 - confidence) / 9)[:, None].expand(-1, 9)
    found = result(torch.cat([confidence[:, None], others], 1), 1 - right.long()).scores
    return found.aurc, found.augrc


def by_definition(confidence: Tensor, right: Tensor) -> tuple[float, float]:
    """Return AURC and AUGRC as means over every order of the images that is sorted by confidence."""
    selective, generalised = [], []
    for order in itertools.permutations(range(len(right))):
        sure = [float(confidence[i]) for i in order]
        if sure == sorted(sure, reverse=True):
            wrong = list(itertools.accumulate(int(not right[i]) for i in order))
            selective.append(statistics.fmean(w / k for k, w in enumerate(wrong, 1)))
            generalised.append(statistics.fmean(w / len(order) for w in wrong))
    return statistics.fmean(selective), statistics.fmean(generalised)


def test_by_hand() -> None:
    scores = result(PROBS, LABELS).scores
    assert (scores.accuracy, scores.error) == (0.75, 0.25)
    assert scores.nll == pytest.approx(-(math.log(0.7) + math.log(0.25) + math.log(0.5) + math.log(0.9)) / 4, rel=1e-6)
    # (0.09 + 0.04 + 0.01), (0.01 + 0.4225 + 0.5625), (0.25 + 0.09 + 0.04), (0 + 0.01 + 0.01)
    assert scores.brier == pytest.approx((0.14 + 0.995 + 0.38 + 0.02) / 4, rel=1e-6)
    # Each of the four falls into a bin of its own: gaps 0.3, 0.65, 0.5, 0.1.
    assert scores.ece == pytest.approx(1.55 / 4, rel=1e-6)


def test_an_impossible_class_costs_a_finite_number_of_nats() -> None:
    scores = result(torch.tensor([[1.0, 0.0]]), torch.tensor([1])).scores
    assert scores.nll == pytest.approx(126 * math.log(2))
    assert scores.brier == 2


@pytest.mark.parametrize("sharpness", [0.5, 3.0])  # unsure and overconfident
def test_calibration_error_is_that_of_torchmetrics(sharpness: float) -> None:
    drawn = torch.Generator().manual_seed(0)
    probs = (sharpness * torch.randn(2000, 10, generator=drawn)).softmax(1)
    labels = torch.randint(10, (2000,), generator=drawn)
    theirs = multiclass_calibration_error(probs, labels, num_classes=10, n_bins=15, norm="l1")
    assert result(probs, labels).scores.ece == pytest.approx(float(theirs), rel=1e-4)


def test_reliability_bins() -> None:
    bins = result(PROBS, LABELS).reliability
    seen = {place: (bins.confidence[place], bins.accuracy[place]) for place, n in enumerate(bins.counts) if n}
    assert list(seen) == [7, 9, 10, 13]  # 0.5, 0.65, 0.7 and 0.9 of fifteen
    assert [a for a, _ in seen.values()] == pytest.approx([0.5, 0.65, 0.7, 0.9])
    assert [b for _, b in seen.values()] == [1, 0, 1, 1]


def test_batches_give_what_the_whole_gives() -> None:
    probs, labels = torch.randn(50, 7).softmax(1), torch.randint(7, (50,))
    parts, whole = result(probs, labels, batch=8), result(probs, labels)
    assert parts == whole
    assert whole.scores.accuracy == pytest.approx(float((probs.argmax(1) == labels).float().mean()))


def test_selective_risk_by_hand() -> None:
    aurc, augrc = areas(CONFIDENCE, RIGHT)
    assert aurc == pytest.approx((0 + 1 / 2 + 1 / 3 + 1 / 2) / 4)
    assert augrc == pytest.approx((0 + 1 + 1 + 2) / 4 / 4)
    others = ((1 - CONFIDENCE) / 9)[:, None].expand(-1, 9)
    risks = result(torch.cat([CONFIDENCE[:, None], others], 1), 1 - RIGHT.long()).risks
    # At 2 %, 4 %, …: of four images one, two, three and four.
    assert len(risks) == 50
    assert [risks[i] for i in (0, 11, 12, 24, 25, 36, 37, 49)] == pytest.approx(
        [0, 0, 1 / 2, 1 / 2, 1 / 3, 1 / 3, 1 / 2, 1 / 2]
    )


@pytest.mark.parametrize("levels", [1, 2, 3, 100])
def test_risk_is_the_mean_over_orders_of_equal_confidences(levels: int) -> None:
    drawn = torch.Generator().manual_seed(levels)
    confidence = 0.2 + 0.7 * torch.randint(levels, (6,), generator=drawn) / levels
    right = torch.rand(6, generator=drawn) < 0.6
    assert areas(confidence, right) == pytest.approx(by_definition(confidence, right))


def test_the_order_of_the_images_does_not_matter() -> None:
    drawn = torch.Generator().manual_seed(0)
    confidence, right = 0.2 + torch.randint(5, (200,), generator=drawn) / 8, torch.rand(200, generator=drawn) < 0.7
    other = torch.randperm(200, generator=drawn)
    assert areas(confidence, right) == pytest.approx(areas(confidence[other], right[other]), rel=1e-12)


def test_limits_of_selective_risk() -> None:
    assert areas(CONFIDENCE, torch.ones(4, dtype=torch.bool)) == (0, 0)
    assert areas(CONFIDENCE, torch.zeros(4, dtype=torch.bool)) == (1, (1 + 2 + 3 + 4) / 16)
    # A confidence that says nothing has the error as its AURC.
    assert areas(torch.full((4,), 0.5), RIGHT)[0] == 0.5


def continual(change: Callable[[Tensor], Tensor]) -> undrift.Report:
    """Return the report on an answerer of the user's own, whose probabilities are changed."""

    def answer(batches: Iterator[Tensor]) -> Iterable[undrift.Prediction]:
        for batch in batches:
            found = undrift.predict(nn.Identity(), batch)
            yield dataclasses.replace(found, probs=change(found.probs))

    return undrift.evaluate_continual(nn.Identity(), {"target": [(logits(PROBS), LABELS)]}, answer)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda p: logits(p) * 2, r"go from.*sums.*needed: probabilities.*softmax"),
        (lambda p: p * 1.1, r"go from.*sums.*needed: probabilities.*softmax"),
        (lambda p: p[:, :2], r"labels go from 0 to 2.*2 classes"),
        (lambda p: p / 0, r"4 of 4 images are NaN or infinite"),
    ],
)
def test_other_numbers_than_probabilities_are_refused(change: Callable[[Tensor], Tensor], match: str) -> None:
    with pytest.raises(undrift.DataError, match=match):
        continual(change)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounded_probabilities_are_none_the_worse(dtype: torch.dtype) -> None:
    exact, rounded = (continual(change).results[0].scores for change in (lambda p: p, lambda p: p.to(dtype)))
    assert (rounded.nll, rounded.brier) == pytest.approx((exact.nll, exact.brier), abs=0.02)
