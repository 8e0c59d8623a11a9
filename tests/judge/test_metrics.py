"""Numbers computed by hand."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torchmetrics.functional.classification import multiclass_calibration_error

import undrift
from undrift.judge import metrics

PROBS = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.5, 0.3, 0.2], [0.0, 0.1, 0.9]])
LABELS = torch.tensor([0, 2, 0, 2])  # right, wrong, right, right


def test_accuracy_and_error() -> None:
    assert metrics.accuracy(PROBS, LABELS) == 0.75
    assert metrics.error(PROBS, LABELS) == 0.25


def test_negative_log_likelihood() -> None:
    expected = -(math.log(0.7) + math.log(0.3) + math.log(0.5) + math.log(0.9)) / 4
    assert metrics.nll(PROBS, LABELS) == pytest.approx(expected, rel=1e-6)
    impossible = metrics.nll(torch.tensor([[1.0, 0.0]]), torch.tensor([1]))
    assert impossible == pytest.approx(126 * math.log(2))


def test_brier() -> None:
    # (0.09 + 0.04 + 0.01), (0.01 + 0.36 + 0.49), (0.25 + 0.09 + 0.04), (0 + 0.01 + 0.01)
    assert metrics.brier(PROBS, LABELS) == pytest.approx((0.14 + 0.86 + 0.38 + 0.02) / 4, rel=1e-6)
    assert metrics.brier(torch.tensor([[1.0, 0.0]]), torch.tensor([1])) == 2


def test_calibration_error() -> None:
    # Confidences 0.7, 0.6, 0.5, 0.9 fall into four of the fifteen bins: gaps 0.3, 0.6, 0.5, 0.1.
    assert metrics.ece(PROBS, LABELS) == pytest.approx(1.5 / 4, rel=1e-6)
    # In one bin: mean confidence 0.675, accuracy 0.75.
    assert metrics.ece(PROBS, LABELS, bins=1) == pytest.approx(0.075, rel=1e-6)
    assert metrics.ece(PROBS, LABELS, bins=np.int64(1)) == metrics.ece(PROBS, LABELS, bins=1)
    # Two bins: (0, 0.5] holds 0.5, right; (0.5, 1] holds 0.7, 0.6, 0.9, two of three right.
    assert metrics.ece(PROBS, LABELS, bins=2) == pytest.approx((0.5 + abs(2 - 2.2)) / 4, rel=1e-6)


@pytest.mark.parametrize("bins", [1, 10, metrics.BINS])
@pytest.mark.parametrize("sharpness", [0.5, 3.0])  # unsure and overconfident
def test_calibration_error_is_that_of_torchmetrics(bins: int, sharpness: float) -> None:
    drawn = torch.Generator().manual_seed(bins)
    probs = (sharpness * torch.randn(2000, 10, generator=drawn, dtype=torch.float64)).softmax(1)
    labels = torch.randint(10, (2000,), generator=drawn)
    theirs = multiclass_calibration_error(probs, labels, num_classes=10, n_bins=bins, norm="l1")
    assert metrics.ece(probs, labels, bins) == pytest.approx(float(theirs), rel=1e-6)


def test_reliability_bins() -> None:
    tally = metrics.Tally()
    tally.add(PROBS[:1], LABELS[:1])
    tally.add(PROBS[1:], LABELS[1:])
    bins = tally.reliability(2)
    assert bins.counts == (1, 3)
    assert bins.confidence == pytest.approx((0.5, 2.2 / 3))
    assert bins.accuracy == pytest.approx((1, 2 / 3))
    assert sum(tally.reliability().counts) == 4


def test_batches_give_what_the_whole_gives() -> None:
    probs, labels = torch.randn(50, 7).softmax(1), torch.randint(7, (50,))
    parts, whole = metrics.Tally(), metrics.Tally()
    for p, y in zip(probs.split(8), labels.split(8), strict=True):
        parts.add(p, y)
    whole.add(probs, labels)
    assert parts.scores() == whole.scores()
    assert whole.scores().accuracy == pytest.approx(float((probs.argmax(1) == labels).float().mean()))


def test_an_image_without_an_answer_is_wrong() -> None:
    tally = metrics.Tally()
    tally.add(torch.full((2, 2), 0.5), torch.tensor([0, 0]), torch.tensor([-1, 0]))
    scores = tally.scores()
    assert (scores.count, scores.accuracy, scores.unanswered) == (2, 0.5, 1)


def test_harmonic_mean() -> None:
    assert metrics.harmonic_mean([0.5, 1.0]) == pytest.approx(2 / 3)
    assert metrics.harmonic_mean([0.836, 0.591]) == pytest.approx(2 * 0.836 * 0.591 / (0.836 + 0.591))
    assert metrics.harmonic_mean([0.0, 1.0]) == 0
    for bad in ([], [-0.1, 0.5], [math.nan, 0.5], [0.5, math.nan], [0.0, math.nan]):
        with pytest.raises(undrift.DataError, match="harmonic mean"):
            metrics.harmonic_mean(bad)


@pytest.mark.parametrize(
    ("probs", "labels", "match"),
    [
        (PROBS, torch.tensor([0, 1, 2, 3]), r"0 to 3.*3 classes \(0 to 2\).*Map them"),
        (PROBS, torch.tensor([0, -1, 2, 1]), "-1 to 2"),
        (PROBS, torch.tensor([0, 1]), r"\(4, 3\) meet 2 labels"),
        (PROBS, torch.eye(4), r"shape \(4, 4\).*argmax"),
        (PROBS, LABELS.float(), "torch.float32"),
        (PROBS / 0, LABELS, r"4 of 4 images are NaN"),
    ],
)
def test_labels_that_cannot_be(probs: torch.Tensor, labels: torch.Tensor, match: str) -> None:
    with pytest.raises(undrift.DataError, match=match):
        metrics.accuracy(probs, labels)


def test_nothing_to_score() -> None:
    tally = metrics.Tally()
    tally.add(torch.empty(0, 3), torch.empty(0, dtype=torch.long))
    with pytest.raises(undrift.DataError, match="no images were scored"):
        tally.scores()


@pytest.mark.parametrize("score", [metrics.nll, metrics.brier, metrics.ece])
def test_logits_are_refused_and_rounded_probabilities_are_not(score: Callable[..., float]) -> None:
    logits, labels = 3 * torch.randn(64, 100), torch.randint(100, (64,))
    for wrong in (logits, logits.softmax(1) * 1.1, torch.tensor([[1.2, -0.2]]).expand(64, 2)):
        with pytest.raises(undrift.DataError, match=r"go from.*sums.*needed: probabilities.*softmax"):
            score(wrong, labels.clamp_max(wrong.shape[1] - 1))
    exact = score(logits.softmax(1), labels)
    for dtype in (torch.float16, torch.bfloat16):
        assert score(logits.softmax(1).to(dtype), labels) == pytest.approx(exact, abs=0.02)
    assert metrics.accuracy(logits, labels) == metrics.accuracy(logits.softmax(1), labels)


@pytest.mark.parametrize("bins", [0, -1, 2.5, True])
def test_bins_are_a_whole_number(bins: int) -> None:
    with pytest.raises(undrift.OptionError, match=r"bins=.*from 1 up"):
        metrics.ece(PROBS, LABELS, bins=bins)
