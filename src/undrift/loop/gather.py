"""Gather single images: each is answered at once, and a step waits until there are enough.

Norm layers that normalise by the batch need a batch. On single images they fail (WRN-40-2 on CIFAR-10-C: 90 % error,
the source 49), and steps on single images ruin the network.

Answers come from the network after its last step, under the statistics that this step left; before the first step they
are the source's. Where a named method has `norm_statistics="batch"`, "train" takes its place.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from undrift._errors import OptionError
from undrift.options import Options
from undrift.posterior.perturbed import Perturbed
from undrift.system.private import BatchNorm
from undrift.system.validate import count_or_none
from undrift.system.warning import warn

SIZES = 4  # of images, each with a batch of its own that fills


class Gather:
    """Keeps images until there are enough for a step, those of each size and precision apart.

    Attributes:
        least: how many images a step needs.
        waiting: the images since the last step, in the parts in which they came.
    """

    balanced = False

    def __init__(self, least: int) -> None:
        self.least = least
        self.waiting: list[Tensor] = []

    def enough(self, images: Tensor) -> Tensor | None:
        """Return all waiting images of this size together with these, or None if a step needs more."""
        before = [part for part in self.waiting if _alike(part, images)]
        if sum(map(len, before)) + len(images) < self.least:
            return None
        return torch.cat([*before, images]) if before else images

    def keep(self, images: Tensor) -> None:
        """Keep these for a later step; where many sizes come, the oldest images are dropped, to bound memory."""
        self.waiting.append(images.detach().clone())  # a camera may write its next image into the same tensor
        while sum(map(len, self.waiting)) > SIZES * self.least:
            del self.waiting[0]

    def forget(self, images: Tensor) -> None:
        """Drop all waiting images of the size of these."""
        self.waiting = [part for part in self.waiting if not _alike(part, images)]

    def state(self) -> dict[str, Any]:
        """Return all that waits, for a stream that resumes."""
        return {"gather": self.least, "waiting": [part.clone() for part in self.waiting]}

    def load(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Resume with the images that waited when a stream was stopped."""
        self.waiting = [part.to(device, copy=True) for part in state["waiting"]]


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape[1:] == b.shape[1:] and a.dtype == b.dtype


def with_kept_statistics(options: Options) -> Options:
    """Return a method's options with norm statistics that are kept between steps, for answers without a step.

    "train" makes the same steps as "batch".
    """
    return options.replace(norm_statistics="train") if options.norm_statistics == "batch" else options


def check_gather(gather: Any, balanced: Any, model: Perturbed, episodic: bool) -> int | None:
    """Return how many images a step waits for, or None for a step per batch."""
    least = count_or_none(gather, "gather", "Leave it out to make a step per batch; 64 serves single images.")
    if not isinstance(balanced, bool):
        raise OptionError(f"balanced={balanced!r} is neither True nor False. The memory's size is gather: gather=128.")
    if least is None:
        if balanced:
            raise OptionError(
                "balanced=True was given without gather; needed: how many images the balanced memory has room for. "
                "Give gather=128 as well."
            )
        return None
    if episodic:
        raise OptionError(
            f"gather={least} was given to an episodic stream, which starts over with every batch; needed: a stream "
            "that remembers more than one. Give episodic=False, or leave gather out."
        )
    if (split := model.options.stream_split) is not None:
        raise OptionError(
            f"gather={least} was given with stream_split={split}; the first makes steps on many batches together, the "
            "second on parts of one. Needed: one of the two. Leave one out."
        )
    for policy in _by_batch(model, ("batch", None)):
        to_do = (
            'Perturb with norm_statistics="train", which makes the same steps (a domain file keeps its own options).'
            if policy.statistics
            else "Give the network norm layers with track_running_stats=True, or leave gather out."
        )
        raise OptionError(
            f"gather={least}: {policy.name} ({type(policy.layer).__name__}) normalises every answer by its own batch; "
            f"needed: statistics that are kept between two steps. {to_do}"
        )
    return least


def warn_of_single(model: Perturbed) -> None:
    """Warn if a stream that normalises by the batch gets images one by one."""
    if _by_batch(model, ("batch", "train", None)):
        warn(
            "images come one by one, and norm layers of this stream normalise by the batch; needed: some dozens of "
            "images for a step (one alone: 90 % error where the source has 49, a WRN-40-2 on CIFAR-10-C). Give "
            "stream(…, gather=64): it answers each at once and makes a step every 64. Or give larger batches."
        )


def _by_batch(model: Perturbed, statistics: Sequence[str | None]) -> list[Any]:
    """Return the policies of batch norms over images that use these statistics; None means a norm that keeps none.

    BatchNorm1d is left out: it has one value per channel of an image, and normalises it by the kept statistics.
    """
    return [
        policy
        for policy in model.norms
        if isinstance(policy.layer, BatchNorm)
        and not isinstance(policy.layer, nn.BatchNorm1d)
        and policy.statistics in statistics
    ]
