"""Domains: images of one kind, with or without labels, on disk (`FileDomain`) or in memory (`TensorDomain`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from undrift._errors import DataError, OptionError
from undrift.images.batches import Batches, Chunk, Decoded, FileFetch, Skipped, other_size, read
from undrift.images.preprocess import RAW, Preprocess, checked
from undrift.images.sources import Source

HOLD_BATCH = 64


@dataclass(frozen=True, eq=False)
class FileDomain:
    """Images that stay on disk and are decoded batch by batch.

    Args:
        name: what reports call it, such as "PACS photo".
        sources: where each image is stored.
        labels: int64, one per image; None for images without labels.
        class_names: the label's meaning, by index.
        preprocess: what is done to an image on its way out.
    """

    name: str
    sources: tuple[Source, ...]
    labels: Tensor | None = None
    class_names: tuple[str, ...] = ()
    preprocess: Preprocess = RAW

    def __len__(self) -> int:
        return len(self.sources)

    def __repr__(self) -> str:
        return f"FileDomain({self.name!r}, {len(self):,} images, {len(self.class_names)} classes)"

    def prepared(self, preprocess: Preprocess) -> FileDomain:
        """Return the same images with another preprocessing."""
        return replace(self, preprocess=checked(preprocess))

    def select(self, indices: Sequence[int]) -> FileDomain:
        """Return the images at these places, in this order."""
        return replace(self, sources=tuple(self.sources[i] for i in indices), labels=_pick(self.labels, indices))

    def batches(
        self,
        batch_size: int,
        *,
        generator: torch.Generator | None = None,
        drop_last: bool = False,
        device: torch.device | str = "cpu",
        workers: int | None = None,
    ) -> Batches[Tensor]:
        """Return (images, labels) on `device`, in order, or shuffled for each pass by `generator`.

        Args:
            drop_last: leave out a last batch that is not full.
            workers: processes that decode; 0 decodes in this one, None takes UNDRIFT_WORKERS from the environment, or
                else one per core.
        """
        labels = _labels(self).to(device)
        return self._batches(lambda chunk: labels[chunk], batch_size, generator, drop_last, device, workers)

    def named_batches(
        self,
        batch_size: int,
        *,
        generator: torch.Generator | None = None,
        drop_last: bool = False,
        device: torch.device | str = "cpu",
        workers: int | None = None,
    ) -> Batches[list[str]]:
        """Return (images, names): `batches` for images without labels; names say where each one is stored."""
        return self._batches(
            lambda chunk: [self.sources[i].name for i in chunk], batch_size, generator, drop_last, device, workers
        )

    def hold(self, device: torch.device | str = "cpu", *, workers: int | None = None) -> TensorDomain:
        """Decode everything once into a `TensorDomain` on `device`: resized and cropped, uint8, not normalised.

        4,000 images of 224×224 take 0.6 GB. With `preprocess.crop` None and `resize` (256, 256) it holds what random
        crops are cut from.
        """
        skipped, kept = Skipped(len(self)), Chunk()
        held: Tensor | None = None
        chunks = [list(range(at, min(at + HOLD_BATCH, len(self)))) for at in range(0, len(self), HOLD_BATCH)]
        for decoded in read(chunks, FileFetch(self.sources, self.preprocess, workers, _pin(device)), skipped):
            images = decoded.images
            if held is None:
                held = torch.empty((len(self), *images.shape[1:]), dtype=torch.uint8, device=device)
            if held.shape[1:] != images.shape[1:]:
                odd, usual = self.sources[decoded.indices[0]].name, f"that of the {len(kept)} before it is"
                raise DataError(other_size(odd, images.shape[1:], usual, held.shape[1:]))
            held[len(kept) : len(kept) + len(images)].copy_(images, non_blocking=True)
            kept += decoded.indices
        if held is None:
            raise DataError(f"{self.name} has no images; needed: at least one. Check the folder it was read from.")
        if skipped.reasons:
            skipped.warn()
        return TensorDomain(
            self.name,
            held[: len(kept)],
            _pick(self.labels, kept),
            self.class_names,
            replace(self.preprocess, resize=None, crop=None),
            tuple(self.sources[i].name for i in kept),
            skipped,
        ).to(device)

    def _batches(
        self,
        target: Callable[[Chunk], _Target],
        batch_size: int,
        generator: torch.Generator | None,
        drop_last: bool,
        device: torch.device | str,
        workers: int | None,
        may_be_empty: bool = False,
    ) -> Batches[_Target]:
        return Batches(
            FileFetch(self.sources, self.preprocess, workers, _pin(device)),
            self.preprocess.normalise,
            target,
            len(self),
            batch_size,
            generator=generator,
            drop_last=drop_last,
            device=torch.device(device),
            may_be_empty=may_be_empty,
        )


@dataclass(frozen=True, eq=False)
class TensorDomain:
    """Images that live in one uint8 tensor N×C×H×W, on any device.

    Args:
        name: what reports call it, such as "CIFAR-10 test".
        labels: int64, one per image, on the images' device; None for images without labels.
        class_names: the label's meaning, by index.
        preprocess: what is still to be done to an image on its way out.
        names: where each image came from; empty if its index says it all.
        skipped: what could not be read when the domain was made.
    """

    name: str
    images: Tensor
    labels: Tensor | None = None
    class_names: tuple[str, ...] = ()
    preprocess: Preprocess = RAW
    names: tuple[str, ...] = ()
    skipped: Skipped = field(default_factory=lambda: Skipped(0))

    def __len__(self) -> int:
        return len(self.images)

    def __repr__(self) -> str:
        return f"TensorDomain({self.name!r}, {len(self):,} images, {len(self.class_names)} classes)"

    def prepared(self, preprocess: Preprocess) -> TensorDomain:
        """Return the same images with another preprocessing."""
        return replace(self, preprocess=checked(preprocess))

    def select(self, indices: Sequence[int]) -> TensorDomain:
        """Return the images at these places, in this order."""
        images = self.images[_index(indices, self.images)]
        names = tuple(self.name_of(i) for i in indices)
        return replace(self, images=images, labels=_pick(self.labels, indices), names=names)

    def to(self, device: torch.device | str) -> TensorDomain:
        """Return the domain with its tensors on `device`."""
        labels = None if self.labels is None else self.labels.to(device)
        return replace(self, images=self.images.to(device), labels=labels)

    def name_of(self, index: int) -> str:
        """Return where the image at this place came from."""
        return self.names[index] if self.names else f"{self.name}[{index}]"

    def batches(
        self, batch_size: int, *, generator: torch.Generator | None = None, drop_last: bool = False
    ) -> Batches[Tensor]:
        """Return (images, labels), in order, or shuffled for each pass by a CPU `generator`."""
        labels = _labels(self)
        return self._batches(lambda chunk: labels[chunk], batch_size, generator, drop_last)

    def named_batches(
        self, batch_size: int, *, generator: torch.Generator | None = None, drop_last: bool = False
    ) -> Batches[list[str]]:
        """Return (images, names): `batches` for images without labels."""
        return self._batches(lambda chunk: [self.name_of(i) for i in chunk], batch_size, generator, drop_last)

    def _batches(
        self,
        target: Callable[[Chunk], _Target],
        batch_size: int,
        generator: torch.Generator | None,
        drop_last: bool,
    ) -> Batches[_Target]:
        return Batches(
            self._fetch,
            self.preprocess,
            target,
            len(self),
            batch_size,
            generator=generator,
            drop_last=drop_last,
            device=self.images.device,
        )

    def _fetch(self, chunks: list[Chunk]) -> Iterable[Decoded]:
        places = ((chunk, torch.as_tensor(chunk).to(self.images.device, non_blocking=True)) for chunk in chunks)
        return (Decoded(chunk, self.images[where], {}, "") for chunk, where in places)


Domain = FileDomain | TensorDomain
_Target = TypeVar("_Target")
_D = TypeVar("_D", FileDomain, TensorDomain)


def shuffle(domain: _D, seed: int = 0) -> _D:
    """Return the domain in a random order, which depends on seed and number of images only."""
    return domain.select(_order(len(domain), seed))


def split(domain: _D, held_out: float = 0.1, seed: int = 0) -> tuple[_D, _D]:
    """Return (train, held out), drawn at random: SHOT's 90/10, or 80/20 with `held_out=0.2` (generalized setting).

    The split depends on seed and number of images only.
    """
    count = round(len(domain) * held_out)
    if not 0 < count < len(domain):
        raise OptionError(
            f"held_out={held_out} leaves {len(domain) - count} of {len(domain)} images to train on and {count} to hold "
            "out; needed: at least one of each. Use a fraction such as 0.1 or 0.2."
        )
    order = _order(len(domain), seed)
    return domain.select(order[count:]), domain.select(order[:count])


def _order(count: int, seed: int) -> list[int]:
    order: list[int] = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    return order


def _labels(domain: Domain) -> Tensor:
    if domain.labels is None:
        raise DataError(
            f"{domain.name} has no labels; needed: one per image, for (images, labels). Use `named_batches`, which "
            "gives (images, names)."
        )
    return domain.labels


def _pick(labels: Tensor | None, indices: Sequence[int]) -> Tensor | None:
    return None if labels is None else labels[_index(indices, labels)]


def _index(indices: Sequence[int], like: Tensor) -> Tensor:
    return torch.as_tensor(indices, dtype=torch.long, device=like.device)


def _pin(device: torch.device | str) -> bool:
    return torch.device(device).type == "cuda"
