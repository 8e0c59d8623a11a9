"""Score segmentation: intersection over union, and the sample of pixels for all other scores."""

import torch
from torch import Tensor

from undrift._errors import DataError
from undrift.posterior.outputs import rows, spread

VOID = (-1, -100, 255)
"""Labels of pixels that no score counts; 255 is a class where there are so many."""

POSITIONS = 4096
"""Pixels of an image that scores other than the intersection over union look at, evenly spread."""


class Overlap:
    """Counts how often each class was answered for each true class.

    Examples:
        >>> overlap = Overlap(2)
        >>> overlap.add(torch.tensor([[0, 0, 1, 1]]), torch.tensor([[0, 1, 1, 1]]))
        >>> round(overlap.mean(), 4)  # of 1/2 and 2/3
        0.5833
    """

    def __init__(self, classes: int) -> None:
        self.counts = torch.zeros(classes, classes, dtype=torch.long)
        self.unanswered = torch.zeros(classes, dtype=torch.long)

    def add(self, answers: Tensor, labels: Tensor) -> None:
        """Take in answers and true classes; void pixels do not count, and no answer is a wrong one."""
        classes = len(self.counts)
        known = ~_void(labels, classes)
        truth, told = labels[known].long(), answers[known].long()
        # A pixel without an answer takes away from its true class alone: it is put beside the table.
        place = truth * (classes + 1) + torch.where(told < 0, classes, told)
        found = torch.bincount(place, minlength=classes * (classes + 1)).view(classes, classes + 1).cpu()
        self.counts = self.counts + found[:, :classes]
        self.unanswered = self.unanswered + found[:, classes]

    def mean(self) -> float:
        """Return the mean over classes of intersection / union; a class that is nowhere does not count."""
        hit = self.counts.diagonal().double()
        union = (self.counts.sum(0) + self.counts.sum(1) + self.unanswered).double() - hit
        return float((hit / union)[union > 0].mean())


def positions(probs: Tensor, labels: Tensor, answers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a row for each position that scores look at: probabilities, true class, answer."""
    if labels.shape != answers.shape or labels.is_floating_point():
        raise DataError(
            f"labels are {labels.dtype} of shape {tuple(labels.shape)}; needed: whole numbers of shape "
            f"{tuple(answers.shape)}, one per position that the network answers. Give class indices at the images' "
            "size, 255 where there is none."
        )
    truth, told = (spread(each, POSITIONS, first=1).flatten() for each in (labels, answers))
    known = ~_void(truth, probs.shape[1])
    return rows(spread(probs, POSITIONS))[known], truth[known].long(), told[known]


def _void(labels: Tensor, classes: int) -> Tensor:
    least = 0 if labels.dtype == torch.uint8 else min(VOID)
    void = [label for label in VOID if label >= least and not 0 <= label < classes]
    return torch.isin(labels, labels.new_tensor(void))
