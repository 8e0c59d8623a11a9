"""Images that come one by one: each is answered at once, and a step waits until enough of them are there.

Norm layers that normalise by the batch need one. Of single images a network makes next to nothing (WRN-40-2 on
CIFAR-10-C: 90 % error, where the source has 48), and its steps ruin it.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from undrift._errors import OptionError, UndriftWarning
from undrift._given import count_or_none
from undrift.options import Options
from undrift.perturb import Perturbed


class Gather:
    """Keeps images until they are enough for a step.

    Attributes:
        least: how many images a step wants.
        waiting: those that came since the last one, in the parts in which they came.
    """

    def __init__(self, least: int) -> None:
        self.least = least
        self.waiting: list[Tensor] = []

    def add(self, images: Tensor) -> Tensor | None:
        """Return all images that wait, these among them, once they are enough; None until then.

        Images of another size than those that wait take their place: a batch has one.
        """
        before = [part for part in self.waiting if part.shape[1:] == images.shape[1:]]
        if sum(map(len, before)) + len(images) < self.least:
            self.waiting = [*before, images.detach().clone()]  # a camera may write the next image to the same place
            return None
        self.waiting = []
        return torch.cat([*before, images]) if before else images

    def load(self, waiting: Sequence[Tensor], device: torch.device) -> None:
        """Go on with the images that waited when a stream was stopped."""
        self.waiting = [part.to(device) for part in waiting]


def between_steps(options: Options) -> Options:
    """Return a method's options such that it can answer between two steps: by statistics that the last one left.

    "train" makes the same steps as "batch".
    """
    return options.replace(norm_statistics="train") if options.norm_statistics == "batch" else options


def gatherer(gather: Any, options: Options, episodic: bool) -> Gather | None:
    """Return what gathers so many images for a step, or None for a step a batch."""
    least = count_or_none(gather, "gather", "Leave it out to make a step a batch; 64 serves single images.")
    if least is None:
        return None
    if episodic:
        raise OptionError(
            f"gather={gather} was given to an episodic stream, which forgets before every batch; what is gathered has "
            "to outlast one. Leave one of them out."
        )
    if options.norm_statistics == "batch":
        raise OptionError(
            f'gather={gather} was given with norm_statistics="batch", which keeps nothing to answer by between two '
            'steps; needed: statistics that stay. Perturb with norm_statistics="train", which makes the same steps.'
        )
    return Gather(least)


def warn_of_single(model: Perturbed) -> None:
    """Warn where a stream that normalises by the batch gets images one by one."""
    if any(p.statistics in ("batch", "train") and isinstance(p.layer, _BatchNorm) for p in model.norms):
        warnings.warn(
            "images come one by one, and norm layers of this stream normalise by the batch; needed: some dozens of "
            "images for a step (one alone: 90 % error where the source has 48, a WRN-40-2 on CIFAR-10-C). Give "
            "stream(…, gather=64): it answers each at once and makes a step every 64. Or give larger batches.",
            UndriftWarning,
            stacklevel=4,
        )
