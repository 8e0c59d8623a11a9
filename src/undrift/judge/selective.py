"""Score selective prediction: risk against coverage, and the areas under the curves.

The images are sorted by confidence, the surest first. At coverage k/n the k surest are answered; the selective risk is
the share of these that is wrong (Geifman & El-Yaniv 2017), the generalised risk the share of all images that is
answered and wrong (Traub et al. 2024).

    AURC  = mean over k of (wrong among the k surest) / k
    AUGRC = mean over k of (wrong among the k surest) / n

Images of equal confidence have no order: each counts as wrong by the share of its group that is.
"""

import torch
from torch import Tensor

POINTS = 50  # of a curve that a report keeps


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


def curve(confidence: Tensor, right: Tensor, points: int = POINTS) -> tuple[float, ...]:
    """Return the selective risk at the coverages 1/points, 2/points, …, 1, each rounded up to whole images.

    Examples:
        >>> curve(torch.tensor([0.9, 0.8, 0.7, 0.6]), torch.tensor([True, False, True, True]), points=2)
        (0.5, 0.25)
    """
    _, risk = risk_coverage(confidence, right)
    answered = (torch.arange(1, points + 1) * len(risk) + points - 1) // points
    return tuple(risk[answered - 1].tolist())


def aurc(confidence: Tensor, right: Tensor) -> float:
    """Return the area under the risk–coverage curve, between 0 and 1; lower is better.

    Examples:
        >>> aurc(torch.tensor([0.9, 0.8]), torch.tensor([True, False]))
        0.25
    """
    return float(risk_coverage(confidence, right)[1].mean())


def augrc(confidence: Tensor, right: Tensor) -> float:
    """Return the area under the generalised risk–coverage curve, between 0 and about ½; lower is better.

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
