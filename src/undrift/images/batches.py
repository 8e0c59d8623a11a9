"""Make batches for a network, decoded in worker processes or taken from a tensor, and report skipped images."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from undrift._errors import DataError, OptionError
from undrift.images.preprocess import Preprocess
from undrift.images.sources import UNREADABLE, ArraySource, Source, pillow
from undrift.images.workers import items_of, shared, usual_workers
from undrift.system.warning import warn

Target = TypeVar("Target")
Chunk = list[int]


@dataclass
class Skipped:
    """Images that could not be read, each with its reason; `len` counts them, `str` reports them."""

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
        """Warn, from the line of the caller's caller."""
        warn(f"{self}. `skipped` names them all.")


class Decoded(NamedTuple):
    """The decoded images of one chunk of indices; plain values, as they may come from another process."""

    indices: Chunk
    images: Tensor
    broken: dict[str, str]
    problem: str


class Batches(Generic[Target]):
    """Pairs of images (float, preprocessed) and targets; can be iterated repeatedly.

    Broken images are left out and added to `skipped`, which is complete after one pass; the first pass that skips any
    warns. A pass without a readable image raises, unless `may_be_empty`.

    Attributes:
        warns: whether a pass is still to warn; set it to False to do so yourself.
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
        may_be_empty: bool = False,
    ) -> None:
        if batch_size < 1:
            raise OptionError(f"batch_size is {batch_size}; needed: 1 or more. 64 to 200 are usual.")
        self.skipped = Skipped(total)
        self._fetch, self._finish, self._target = fetch, finish, target
        self._batch_size, self._drop_last = batch_size, drop_last
        self._generator, self._device, self._may_be_empty = generator, device, may_be_empty
        self.warns = True
        self.divide: Callable[[Chunk], Chunk] | None = None  # which part of a batch this process takes, of several

    def __len__(self) -> int:
        """Return the number of batches; too high if whole batches are broken."""
        full, rest = divmod(self.skipped.total, self._batch_size)
        return full + (rest > 0 and not self._drop_last)

    def __iter__(self) -> Iterator[tuple[Tensor, Target]]:
        count = self.skipped.total
        order = torch.randperm(count, generator=self._generator).tolist() if self._generator else list(range(count))
        chunks = [order[at : at + self._batch_size] for at in range(0, count, self._batch_size)][: len(self)]
        if self.divide is not None:
            chunks = [self.divide(chunk) for chunk in chunks]
        for decoded in read(chunks, self._fetch, self.skipped, self._may_be_empty, self.divide is not None):
            if not decoded.indices:
                yield decoded.images, self._target([])
                continue
            images = decoded.images.to(self._device, non_blocking=True)
            yield self._finish(images), self._target(decoded.indices)
        if self.skipped.reasons and self.warns:
            self.warns = False
            self.skipped.warn()


def read(
    chunks: list[Chunk],
    fetch: Callable[[list[Chunk]], Iterable[Decoded]],
    skipped: Skipped,
    may_be_empty: bool = False,
    every: bool = False,
) -> Iterator[Decoded]:
    """Yield the chunks that have a readable image, adding broken ones to `skipped`; raise if there is none.

    Args:
        every: yield those without one too, and never raise: what there is may be in other processes.
    """
    any_left = may_be_empty
    for decoded in fetch(chunks):
        skipped.reasons.update(decoded.broken)
        if decoded.problem:
            raise DataError(decoded.problem)
        any_left = any_left or bool(decoded.indices)
        if decoded.indices or every:
            yield decoded
    if chunks and not any_left and not every:
        raise DataError(f"{skipped}; needed: at least one that can be read. Check the files, or copy them again.")


class FileFetch:
    """Decodes chunks of sources, in worker processes if there are any."""

    def __init__(self, sources: Sequence[Source], preprocess: Preprocess, workers: int | None, pin: bool) -> None:
        self._decoder = _Decoder(sources, preprocess)
        self._workers = usual_workers(len(sources)) if workers is None else workers
        self._pin = pin

    def __call__(self, chunks: list[Chunk]) -> Iterable[Decoded]:
        """Return the decoded chunks in order."""
        if not all(isinstance(source, ArraySource) for source in self._decoder.sources):
            pillow()  # raise here, once, instead of giving it as the reason of every single image
        loader: DataLoader[Decoded] = DataLoader(
            self._decoder,
            sampler=chunks,  # an "index" is a chunk: one worker decodes a whole batch
            batch_size=None,
            collate_fn=_unchanged,
            num_workers=min(self._workers, len(chunks)),
            pin_memory=self._pin,
        )
        return items_of(loader)


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
            return Decoded([], torch.empty(0), broken, self._unlike(indices, images))
        batch = torch.stack(images) if images else torch.empty(0)
        problem = shared(batch)
        return Decoded([], torch.empty(0), broken, problem) if problem else Decoded(indices, batch, broken, "")

    def _unlike(self, indices: Chunk, images: list[Tensor]) -> str:
        """Return the error for images of different sizes: the most frequent size, and one image of another."""
        (usual, count), *_ = Counter(image.shape for image in images).most_common()
        odd = next(place for place, image in enumerate(images) if image.shape != usual)
        name = self.sources[indices[odd]].name
        return other_size(name, images[odd].shape, f"the usual size of its batch ({count} of {len(images)}) is", usual)


def other_size(name: str, found: torch.Size, others: str, usual: torch.Size) -> str:
    """Return three facts about an image that cannot lie in one tensor with others.

    It is not skipped like a broken one: the size that most of a batch have is chance, and a network that never sees
    upright photographs has adapted to something else.
    """
    _, height, width = usual
    return (
        f"{name} has {found[1]}×{found[2]} pixels, {others} {height}×{width}; needed: one size. Bring all to it in the "
        f"preprocessing (resize=({height}, {width}); on the command line --resize {height}x{width}), or convert that "
        "image."
    )


def _unchanged(decoded: Any) -> Any:
    return decoded
