"""Iterate over the finite images of a domain; skip and count those with NaN or infinity."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from undrift._errors import DataError, ProcessLost, UndriftError
from undrift.answer.forward import finite_rows
from undrift.loop.indexed_loader import Pass
from undrift.loop.unlabelled import Unlabelled, unlabelled_of
from undrift.options import Statistics
from undrift.posterior.batch import as_tensor, to_device
from undrift.posterior.perturbed import Perturbed
from undrift.system import ranks
from undrift.system.warning import warn

Failed = Callable[[Exception], DataError]
"""Says where a run stood when the user's data set raised."""


class FiniteImages:
    """The finite images of a domain, batch by batch, on the network's device.

    Args:
        unlabelled: what steps are made on, in any form that `unlabelled_of` takes.
        clean: the same images at the same places without augmentation, to look at; None takes `unlabelled`.
        batch_size: of batches that are made here; `generator` gives their order.
        same_places: whether a place has to mean the same image in every pass.

    With several processes, places are those of a whole batch, and images this process's part of it; the network knows
    how they lie while it is asked for that batch.

    Attributes:
        given: what the caller gave.
        data: the images that steps are made on; `looked_at`, those for pseudo-labels and surveys.
        bad: places of the images that were skipped.
    """

    def __init__(
        self,
        model: Perturbed,
        unlabelled: Any,
        clean: Any,
        batch_size: int,
        generator: torch.Generator,
        same_places: bool,
    ) -> None:
        self.model, self.given = model, (unlabelled := as_tensor(unlabelled))
        strict = same_places or ranks.world_size() > 1
        self.data: Unlabelled = unlabelled_of(unlabelled, batch_size, generator, strict)
        self.looked_at = self.data if clean is None else unlabelled_of(as_tensor(clean), batch_size, generator, strict)
        self.bad: set[int] = set()
        if self.looked_at.size != self.data.size:
            raise DataError(
                f"clean has {self.looked_at.size} images, unlabelled {self.data.size}; they are the same images at the "
                "same places. Make both from the same data set, with and without augmentation."
            )

    def epoch(self, failed: Failed) -> Pass:
        """Yield the batches of one epoch; a batch may end up empty."""
        return self._finite(self.data.epoch(), failed)

    def everything(self, failed: Failed) -> Pass:
        """Yield every image once. A batch of one is left out where norm layers would look at it."""
        least = 2 if self.lone_ones_out("batch") else 1
        for places, images in self._finite(self.looked_at.everything(), failed):
            if len(places) >= least:
                yield places, images

    def lone_ones_out(self, *statistics: Statistics) -> bool:
        """Return whether to skip batches of one image: others are larger, and a norm layer has such a policy."""
        return self.data.size > self.data.steps and any(policy.statistics in statistics for policy in self.model.norms)

    def warn(self) -> None:
        """Warn, once, of what the passes so far gave reason to."""
        for doubts in (self.data.doubts, self.looked_at.doubts):
            while doubts:
                warn(doubts.pop())

    def _finite(self, batches: Pass, failed: Failed) -> Pass:
        try:
            while (batch := self._next(batches, failed)) is not None:
                places, images = batch[0], to_device(batch[1], self.model)
                here = None
                if len(images) and not bool((finite := finite_rows(images)).all()):
                    here, images = finite.cpu(), images[finite]
                if ranks.world_size() > 1:
                    # −1 − place is one that was left out, of which all hear so.
                    told = places if here is None else torch.where(here, places, -1 - places)
                    self.model.key.share, images, told = ranks.share_rows(images, told)
                    here, places = told >= 0, torch.where(told < 0, -1 - told, told)
                if here is not None:
                    self.bad.update(places[~here].tolist())
                    places = places[here]
                yield places, images
        finally:
            self.model.key.share = None

    def _next(self, batches: Pass, failed: Failed) -> tuple[Tensor, Tensor] | None:
        """Return the next batch, None at the end; what goes wrong with it goes wrong in all processes."""
        try:
            try:
                return next(batches, None)
            except UndriftError:
                raise
            except Exception as error:
                raise failed(error) from error
        except UndriftError as error:
            if ranks.world_size() > 1 and not isinstance(error, ProcessLost):
                ranks.tell_failure(error)
            raise
