"""Error, likelihood, calibration and selective risk of predictions, as fractions."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from undrift._errors import DataError
from undrift.judge import maps

BINS = 15  # of the largest probability, as in most papers
POINTS = 50  # of a risk–coverage curve that a report keeps
_ROUNDED = 0.02  # how far bfloat16 rounding takes the sum of a row from 1
_LEAST = 2.0**-126  # smallest normal float32: a probability of 0 costs 87.3 nats, not infinity


@dataclass(frozen=True)
class Scores:
    """The scores of one set of predictions, the number of images, and how many of them got no answer.

    An image without an answer (NaN in it, or in its logits) counts as wrong, with uniform probabilities. `aurc` and
    `augrc` are the areas under the risk–coverage curves; a report that was saved without them has None. Where a network
    answers each pixel, or each label, these are what is counted, up to 4,096 of each image, and `miou` is the mean
    intersection over union of all pixels.
    """

    count: int
    accuracy: float
    nll: float
    brier: float
    ece: float
    unanswered: int = 0
    aurc: float | None = None
    augrc: float | None = None
    miou: float | None = None

    @property
    def error(self) -> float:
        """1 − accuracy."""
        return 1 - self.accuracy


@dataclass(frozen=True)
class Reliability:
    """What a reliability diagram shows: images, mean confidence and accuracy of each bin (0 in an empty one)."""

    counts: tuple[int, ...]
    confidence: tuple[float, ...]
    accuracy: tuple[float, ...]

    @property
    def ece(self) -> float:
        """Σ_bins (images in the bin / all images) · |accuracy − confidence|."""
        gaps = (n * abs(a - c) for n, c, a in zip(self.counts, self.confidence, self.accuracy, strict=True))
        return sum(gaps) / sum(self.counts)


class Tally:
    """Scores predictions batch by batch; keeps five numbers per image, not its probabilities."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._overlap: maps.Overlap | None = None

    def add(self, probs: Tensor, labels: Tensor, answers: Tensor | None = None) -> None:
        """Take in one batch: probabilities (batch × classes), true classes, and what was answered (−1: nothing).

        Of a network that answers each pixel: batch × classes × height × width, and batch × height × width.
        """
        if probs.ndim > 2:
            answers = probs.argmax(1) if answers is None else answers
            some = maps.positions(probs, labels, answers)
            if probs.ndim > 3:
                self._overlap = self._overlap or maps.Overlap(probs.shape[1])
                self._overlap.add(answers, labels)
            probs, labels, answers = some
        check(probs, labels)
        p, labels = probs.detach().double().cpu(), labels.detach().long().cpu()
        _refuse_logits(p)
        confidence, label = p.max(1)
        if answers is not None:
            label = answers.cpu()
        true = p.gather(1, labels[:, None])[:, 0]
        brier = p.square().sum(1) - 2 * true + 1
        columns = (confidence, (label == labels).double(), -true.clamp_min(_LEAST).log(), brier, (label < 0).double())
        self._kept.append(torch.stack(columns))

    def reliability(self) -> Reliability:
        """Return the bins of the reliability diagram."""
        confidence, correct, *_ = self._all()
        # Bin i is (i / BINS, (i + 1) / BINS]: a confidence on an edge belongs to the lower bin.
        place = (confidence * BINS).ceil().long().sub(1).clamp(0, BINS - 1)
        counts = torch.bincount(place, minlength=BINS)
        sums = [torch.zeros(BINS, dtype=torch.float64).index_add_(0, place, v) for v in (confidence, correct)]
        means = [(s / counts.clamp_min(1)).tolist() for s in sums]
        return Reliability(tuple(counts.tolist()), tuple(means[0]), tuple(means[1]))

    def scores(self) -> Scores:
        """Return the means over all images so far."""
        kept = self._all()
        _, accuracy, nll, brier, _ = kept.mean(1).tolist()
        areas = aurc(*kept[:2]), augrc(*kept[:2])
        miou = None if self._overlap is None else self._overlap.mean()
        return Scores(kept.shape[1], accuracy, nll, brier, self.reliability().ece, int(kept[4].sum()), *areas, miou)

    def risks(self) -> tuple[float, ...]:
        """Return the risk–coverage curve: the share of wrong answers among the surest 2 %, 4 %, …, 100 %."""
        confidence, correct, *_ = self._all()
        return curve(confidence, correct)

    def _all(self) -> Tensor:
        if not sum(k.shape[1] for k in self._kept):
            raise _none_scored()
        return torch.cat(self._kept, dim=1)


def scored(probs: Tensor, labels: Tensor) -> Scores:
    """Return the scores of one batch."""
    tally = Tally()
    tally.add(probs, labels)
    return tally.scores()


def harmonic_mean(values: Sequence[float]) -> float:
    """Return n / Σ 1/v, or 0 if a value is 0: high only if all values are.

    Examples:
        >>> round(harmonic_mean([0.766, 0.716]), 3)
        0.74
    """
    if not values or not all(v >= 0 for v in values):  # NaN neither
        raise DataError(f"a harmonic mean of {list(values)} does not exist; needed: values from 0 up. Give accuracies.")
    return len(values) / sum(1 / v for v in values) if min(values) > 0 else 0.0


def check(probs: Tensor, labels: Tensor) -> None:
    """Raise if labels cannot belong to these predictions."""
    if labels.ndim != 1 or labels.is_floating_point() or labels.is_complex():
        raise DataError(
            f"labels are {labels.dtype} of shape {tuple(labels.shape)}; needed: one whole number per image. "
            "Give class indices: one_hot.argmax(1) for one-hot labels."
        )
    if probs.ndim != 2 or len(probs) != len(labels):
        raise DataError(
            f"predictions of shape {tuple(probs.shape)} meet {len(labels)} labels; needed: one row of probabilities "
            "per label. Let the loader yield images with their own labels."
        )
    if not len(labels):
        return
    least, most = int(labels.min()), int(labels.max())
    if least < 0 or most >= probs.shape[1]:
        raise DataError(
            f"labels go from {least} to {most}, but the network has {probs.shape[1]} classes (0 to "
            f"{probs.shape[1] - 1}); needed: labels in the order of its outputs. Map them to the network's classes, "
            "and leave images of other classes out."
        )
    if not bool(torch.isfinite(probs).all()):
        bad = int((~torch.isfinite(probs)).any(1).sum())
        raise DataError(
            f"the predictions of {bad} of {len(probs)} images are NaN or infinite; needed: probabilities. Look for NaN "
            "in the images, or for an adaptation that diverged (lower its learning rate)."
        )


def _none_scored() -> DataError:
    return DataError("no images were scored; needed: at least one labelled batch. Check that the loader has any.")


def _refuse_logits(probs: Tensor) -> None:
    if not len(probs):
        return
    sums = probs.sum(1)
    if bool(((probs - 0.5).abs() > 0.5 + _ROUNDED).any() or ((sums - 1).abs() > _ROUNDED).any()):
        raise DataError(
            f"predictions go from {float(probs.min()):.3g} to {float(probs.max()):.3g}, the sums of their rows from "
            f"{float(sums.min()):.3g} to {float(sums.max()):.3g}; needed: probabilities, each from 0 to 1, in rows of "
            "sum 1. For logits give logits.softmax(1)."
        )


# Selective prediction: the images are sorted by confidence, the surest first, and at coverage k/n the k surest are
# answered. Selective risk is the share of these that is wrong (Geifman & El-Yaniv 2017), generalised risk the share of
# all images that is answered and wrong (Traub et al. 2024). Images of equal confidence have no order: each counts as
# wrong by the share of its group that is.


def risk_coverage(confidence: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return coverage and selective risk after each image, the surest first.

    Examples:
        >>> coverage, risk = risk_coverage(torch.tensor([0.9, 0.8, 0.6]), torch.tensor([True, False, True]))
        >>> [round(float(r), 2) for r in risk]
        [0.0, 0.5, 0.33]
    """
    wrong = _wrong_in_order(confidence, right)
    answered = torch.arange(1, len(wrong) + 1, dtype=torch.float64)
    return answered / len(wrong), wrong.cumsum(0) / answered


def curve(confidence: Tensor, right: Tensor) -> tuple[float, ...]:
    """Return the selective risk at the coverages 1/50, 2/50, …, 1, each rounded up to whole images."""
    _, risk = risk_coverage(confidence, right)
    answered = (torch.arange(1, POINTS + 1) * len(risk) + POINTS - 1) // POINTS
    return tuple(risk[answered - 1].tolist())


def aurc(confidence: Tensor, right: Tensor) -> float:
    """Return the area under the risk–coverage curve: the mean over k of (wrong among the k surest) / k.

    Examples:
        >>> aurc(torch.tensor([0.9, 0.8]), torch.tensor([True, False]))
        0.25
    """
    return float(risk_coverage(confidence, right)[1].mean())


def augrc(confidence: Tensor, right: Tensor) -> float:
    """Return the area under the generalised curve: the mean over k of (wrong among the k surest) / n.

    Examples:
        >>> augrc(torch.tensor([0.9, 0.8]), torch.tensor([True, False]))
        0.25
    """
    wrong = _wrong_in_order(confidence, right)
    return float(wrong.cumsum(0).mean() / len(wrong))


def _wrong_in_order(confidence: Tensor, right: Tensor) -> Tensor:
    """Return how wrong each image's answer is, the surest first; equal confidences share their mean."""
    confidence, wrong = confidence.detach().cpu().double(), (~right.bool()).detach().cpu().double()
    order = confidence.argsort(descending=True, stable=True)
    _, group, count = torch.unique_consecutive(confidence[order], return_inverse=True, return_counts=True)
    share = torch.zeros(len(count), dtype=torch.float64).index_add_(0, group, wrong[order]) / count
    return share[group]
