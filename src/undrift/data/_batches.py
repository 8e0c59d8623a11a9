"""Batches ready for a network, decoded in worker processes or taken from a tensor; what was skipped is reported."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from undrift._errors import DataError, OptionError, UndriftWarning

from ._sources import UNREADABLE, ArraySource, Source, pillow
from .preprocess import Preprocess

Target = TypeVar("Target")
Chunk = list[int]
FEW = 256
"""Below this many images, starting worker processes costs more than they save."""


@dataclass
class Skipped:
    """Images that could not be read, each with its reason; the count is `len`, the report is `str`."""

    total: int
    reasons: dict[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.reasons)

    def __str__(self) -> str:
        if not self.reasons:
            return f"all {self.total} images were read"
        shown = [f"{name} ({reason})" for name, reason in list(self.reasons.items())[:3]]
        more = "" if len(self) <= 3 else f" and {len(self) - 3} more"
        return f"{len(self)} of {self.total} images could not be read and were skipped: {', '.join(shown)}{more}"

    def warn(self) -> None:
        """Say it in a warning, from where the caller's caller stands."""
        warnings.warn(f"{self}. `skipped` names them all.", UndriftWarning, stacklevel=3)


class Decoded(NamedTuple):
    """What comes back for one chunk of indices. Plain values, as it may come from another process."""

    indices: Chunk
    images: Tensor
    broken: dict[str, str]
    problem: str


class Batches(Generic[Target]):
    """Pairs of images (float, as the network wants them) and targets; can be gone through again and again.

    Broken images are left out and written to `skipped`, which is complete after one pass; the first pass that skips
    any says so in a warning.
    """

    def __init__(
        self,
        fetch: Callable[[list[Chunk]], Iterable[Decoded]],
        finish: Callable[[Tensor], Tensor],
        target: Callable[[Chunk], Target],
        total: int,
        batch_size: int,
        *,
        generator: torch.Generator | None,
        drop_last: bool,
        device: torch.device,
    ) -> None:
        if batch_size < 1:
            raise OptionError(f"batch_size is {batch_size}; needed: 1 or more. 64 to 200 are usual.")
        self.skipped = Skipped(total)
        self._fetch, self._finish, self._target = fetch, finish, target
        self._batch_size, self._drop_last = batch_size, drop_last
        self._generator, self._device = generator, device
        self._warned = False

    def __len__(self) -> int:
        """Return the number of batches, one or more too high where whole batches are broken."""
        full, rest = divmod(self.skipped.total, self._batch_size)
        return full + (rest > 0 and not self._drop_last)

    def __iter__(self) -> Iterator[tuple[Tensor, Target]]:
        count = self.skipped.total
        order = torch.randperm(count, generator=self._generator).tolist() if self._generator else list(range(count))
        chunks = [order[at : at + self._batch_size] for at in range(0, count, self._batch_size)][: len(self)]
        for decoded in read(chunks, self._fetch, self.skipped):
            images = decoded.images.to(self._device, non_blocking=True)
            yield self._finish(images), self._target(decoded.indices)
        if self.skipped.reasons and not self._warned:
            self._warned = True
            self.skipped.warn()


def read(chunks: list[Chunk], fetch: Callable[[list[Chunk]], Iterable[Decoded]], skipped: Skipped) -> Iterator[Decoded]:
    """Yield the chunks that have an image left, noting the broken ones in `skipped`; raises if nothing is left."""
    any_left = False
    for decoded in fetch(chunks):
        skipped.reasons.update(decoded.broken)
        if decoded.problem:
            raise DataError(decoded.problem)
        if decoded.indices:
            any_left = True
            yield decoded
    if chunks and not any_left:
        raise DataError(f"{skipped}; needed: at least one that can be read. Check the files, or copy them again.")


class FileFetch:
    """Decodes chunks of sources, in worker processes where there are any."""

    def __init__(self, sources: Sequence[Source], preprocess: Preprocess, workers: int | None, pin: bool) -> None:
        self._decoder = _Decoder(sources, preprocess)
        self._workers = usual_workers(len(sources)) if workers is None else workers
        self._pin = pin

    def __call__(self, chunks: list[Chunk]) -> Iterable[Decoded]:
        """Return the decoded chunks in order."""
        if not all(isinstance(source, ArraySource) for source in self._decoder.sources):
            pillow()  # said here, once, rather than as the reason of every single image
        loader: DataLoader[Decoded] = DataLoader(
            self._decoder,
            sampler=chunks,  # an "index" is a chunk: one worker decodes a whole batch
            batch_size=None,
            collate_fn=_unchanged,
            num_workers=min(self._workers, len(chunks)),
            pin_memory=self._pin,
        )
        return loader


class _Decoder(Dataset[Decoded]):
    def __init__(self, sources: Sequence[Source], preprocess: Preprocess) -> None:
        self.sources, self.preprocess = sources, preprocess

    def __getitem__(self, chunk: Chunk) -> Decoded:
        indices: Chunk = []
        images: list[Tensor] = []
        broken: dict[str, str] = {}
        for index in chunk:
            source = self.sources[index]
            try:
                images.append(source.read(self.preprocess))
                indices.append(index)
            except UNREADABLE as error:
                broken[source.name] = str(error) or type(error).__name__
        if len({image.shape for image in images}) > 1:
            first, other = images[0], next(image for image in images if image.shape != images[0].shape)
            problem = (
                f"images of different sizes meet in one batch ({_size(first)} and {_size(other)}); needed: one size. "
                "Give the domain a preprocessing with `crop`, or with `resize` to (height, width)."
            )
            return Decoded([], torch.empty(0), broken, problem)
        return Decoded(indices, torch.stack(images) if images else torch.empty(0), broken, "")


def usual_workers(images: int) -> int:
    """Return how many processes to decode with: none for a few images, else the cores this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 0 if images < FEW else cores


def _size(image: Tensor) -> str:
    return f"{image.shape[1]}×{image.shape[2]}"


def _unchanged(decoded: Any) -> Any:
    return decoded
