"""Accept unlabelled images in every form that users have, and iterate over the finite ones, with their places."""

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from undrift._errors import DataError, ProcessLost, UndriftError
from undrift.answer.forward import finite_rows
from undrift.images import FileDomain, TensorDomain
from undrift.loop.indexed_loader import OfLoader, Pass, avoid_last_single, mixed_batches, require_images
from undrift.options import Statistics
from undrift.posterior.batch import as_tensor, images_of, to_device
from undrift.posterior.perturbed import Perturbed
from undrift.system import ranks
from undrift.system.ranks import part, world_size
from undrift.system.validate import a_type
from undrift.system.warning import warn


class Unlabelled(Protocol):
    """A domain to go through many times. Of each batch, a process gets its part (see `undrift.system.ranks`).

    Attributes:
        size: number of images.
        steps: number of batches in an epoch.
        aligned: whether a place means the same image in every pass.
        generators: what the order is drawn from, besides torch's global generator.
        doubts: what the caller should warn of; passes may add to it.
    """

    size: int
    steps: int
    aligned: bool
    generators: list[torch.Generator]
    doubts: list[str]

    def epoch(self) -> Pass:
        """Yield the batches of one epoch, in an order of its own."""
        ...

    def everything(self) -> Pass:
        """Yield each image once, in a mixed order that is the same every time.

        Images are often sorted by class, and norm layers that use the statistics of a batch must not see batches of one
        class.
        """
        ...


def unlabelled_of(data: Any, batch_size: int, generator: torch.Generator, strict: bool = True) -> Unlabelled:
    """Return the domain of what a user gives as unlabelled images; labels are not read.

    Args:
        data: a DataLoader, a Dataset, a tensor, an undrift.images domain, a list of batches, or another iterable that
            can be gone through again.
        batch_size: of batches that are made here.
        generator: gives their order.
        strict: raise where a place does not mean the same image in every pass.
    """
    if isinstance(data, FileDomain | TensorDomain):
        return _OfDomain(data, batch_size, generator)
    if isinstance(data, Tensor):
        return _OfTensor(images_of(data), batch_size, generator)
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        require_images(data)  # before torch's sampler says it in its own words
        data = DataLoader(data, batch_size, shuffle=True, generator=generator)
    elif isinstance(data, IterableDataset):
        data = DataLoader(data, batch_size)
    own = isinstance(data, DataLoader) and type(data).__iter__ is not DataLoader.__iter__
    if isinstance(data, DataLoader) and data.batch_sampler is not None and hasattr(data.dataset, "__len__") and not own:
        return OfLoader(data, strict)
    if isinstance(data, str | bytes | Mapping) or not isinstance(data, Iterable):
        raise DataError(
            f"unlabelled is {a_type(data)}; adapt needs a DataLoader, a Dataset, a tensor of images, a domain "
            "of undrift.images or a list of batches. For a folder of images: undrift.images.domain(folder)."
        )
    if isinstance(data, Iterator):
        raise DataError(
            f"unlabelled is {a_type(data)}, which gives its batches once; adapt needs them every epoch. Give "
            "a DataLoader or list(batches); for one pass as images arrive use undrift.stream."
        )
    batches = _OfIterable(data)
    if strict and not batches.aligned:
        do = "Give a DataLoader over a data set with a length (it may shuffle and augment), a tensor, or a list."
        if own:
            do = (
                f"{type(data).__name__} has its own __iter__, whose images have no place but their position in the "
                "pass: do what it does in the data set or the collate_fn of a plain DataLoader, or let it neither "
                "shuffle nor augment."
            )
        raise DataError(
            "two passes over unlabelled gave different images at the same position, and this likelihood keeps a label "
            f"for each image. {do}"
        )
    return batches


class _OfTensor:
    """Images in one tensor, on any device."""

    def __init__(self, images: Tensor, batch_size: int, generator: torch.Generator) -> None:
        self.images, self.batch_size = images, batch_size
        require_images(images)
        self.size, self.steps, self.aligned = len(images), math.ceil(len(images) / batch_size), True
        self.generators = [generator]
        self.doubts: list[str] = []

    def epoch(self) -> Pass:
        order = torch.randperm(self.size, generator=self.generators[0])
        for places in map(part, order.split(self.batch_size)):
            yield places, self._at(places)

    def everything(self) -> Pass:
        for chunk in mixed_batches(range(self.size), self.batch_size):
            places = torch.tensor(part(chunk), dtype=torch.int64)
            yield places, self._at(places)

    def _at(self, places: Tensor) -> Tensor:
        # Not blocking: an index on the CPU would wait for everything that the GPU has still to do.
        return self.images[places.to(self.images.device, non_blocking=True)]


class _OfDomain:
    """A domain of undrift.images, which itself skips, counts and names unreadable images."""

    def __init__(self, domain: FileDomain | TensorDomain, batch_size: int, generator: torch.Generator) -> None:
        require_images(domain)
        self.size, self.steps, self.aligned = len(domain), math.ceil(len(domain) / batch_size), True
        self.generators = [generator]
        self.doubts: list[str] = []
        self._fixed = torch.Generator()
        self._epoch = _placed(domain, batch_size, generator)
        self._everything = _placed(domain, avoid_last_single(batch_size, len(domain)), self._fixed)

    def epoch(self) -> Pass:
        for images, places in self._epoch:
            yield torch.tensor(places, dtype=torch.int64), images

    def everything(self) -> Pass:
        self._fixed.manual_seed(0)
        for images, places in self._everything:
            yield torch.tensor(places, dtype=torch.int64), images


def _placed(
    domain: FileDomain | TensorDomain, batch_size: int, generator: torch.Generator
) -> Iterable[tuple[Tensor, list[int]]]:
    """Return batches of images with their places in the domain instead of labels."""
    if isinstance(domain, TensorDomain):
        batches = domain._batches(list, batch_size, generator, False)
    else:
        batches = domain._batches(list, batch_size, generator, False, "cpu", None)
    batches.divide = part if world_size() > 1 else None
    return batches


class _OfIterable:
    """Batches in the order of a user's iterable; an image's index is its position in the pass."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = batches
        found = (getattr(batches, "generator", None), getattr(getattr(batches, "sampler", None), "generator", None))
        self.generators = list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())
        self.doubts: list[str] = []
        self._seen = [_mark(images_of(item)) for item in batches]  # one more pass, to count them
        self.size, self.steps = sum(rows for rows, _ in self._seen), len(self._seen)
        if self.size == 0:
            raise DataError("unlabelled gave no batch; adapt needs some images. Check that it can be iterated twice.")
        again = [_mark(images_of(item)) for item, _ in zip(batches, range(2), strict=False)]
        self.aligned = again == self._seen[: len(again)] and len(again) == min(2, self.steps)

    def epoch(self) -> Pass:
        at = number = 0
        for number, item in enumerate(self.batches, 1):
            images = images_of(item)
            if self.aligned and (number > self.steps or _mark(images) != self._seen[number - 1]):
                raise DataError(
                    f"batch {number} of a pass holds other images than in the first pass; images without an index are "
                    "identified by their position. Give a DataLoader over a data set with a length, which may shuffle."
                )
            yield part(torch.arange(at, at + len(images))), part(images)
            at += len(images)
        if number == 0:
            raise DataError(
                "a later pass over the batches gave none; adapt needs them every epoch. Give a list or a DataLoader."
            )

    def everything(self) -> Pass:
        yield from self.epoch()


def _mark(images: Tensor) -> tuple[int, int]:
    """Return the number of images and a checksum of the first, enough to notice another order."""
    first = images[:1].detach().cpu().contiguous()
    return len(images), zlib.crc32(first.view(torch.uint8).numpy().tobytes()) if len(images) else 0


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
        self._divided = ranks.world_size() > 1
        strict = same_places or self._divided
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
                if self._divided:
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
            if self._divided and not isinstance(error, ProcessLost):
                ranks.tell_failure(error)
            raise
