"""Iterate over a user's DataLoader with each image's index in its data set."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from undrift._errors import DataError
from undrift.posterior.batch import KEYS, images_of
from undrift.system.ranks import part, world_size


@contextmanager
def rewinding_generators() -> Iterator[Callable[[], None]]:
    """Give a function that rewinds the global generators to this point; the end of the block undoes the rewinding.

    Those are torch's on the CPU, NumPy's and Python's, which a collate function draws from if it has none of its own.
    """
    before = _state()
    now = []

    def repeat() -> None:
        now.append(_state())
        _put(before)

    try:
        yield repeat
    finally:
        if now:
            _put(now[0])


def reorders(collate: Callable[[Any], Any], samples: Sequence[Any], images: Tensor) -> bool:
    """Return whether a collate function was seen to reorder samples.

    Likelihoods keep a label for each index of the data set; after a reordering, labels would silently belong to other
    images. So the function is called a second time on the same samples in another order, with the same random numbers.
    If it keeps the order, its rows follow the samples. If the same rows come back at other places, it sorts or
    shuffles. Rows with other values prove nothing, because an augmentation may depend on the position.

    Args:
        samples: copies of the samples of one batch; the random numbers are those of the first call.
        images: what the function made of them in the first call.
    """
    count = len(images)
    if count < 3:
        return False
    # Shift all but the last by one: a fixed order of the function's own (say, reversed) could fit this only by chance.
    other = [count - 2, *range(count - 2), count - 1]
    try:
        made = images_of(collate([samples[at] for at in other]))
    except Exception:  # the first call made the batch, so an error of the second one is no problem
        return False
    if made.shape != images.shape or made.dtype != images.dtype or torch.equal(made, images[other]):
        return False
    return _rows(made) == _rows(images)


def copied(sample: Any) -> Any:
    """Return the sample with its containers and tensors copied: a collate function may change them in place.

    Other objects, labels among them, are passed on untouched.
    """
    kind = type(sample)  # not isinstance, which asks an object for its class
    if kind is dict:
        return {key: copied(value) for key, value in sample.items()}
    if kind in (list, tuple):
        return kind(copied(value) for value in sample)
    if issubclass(kind, Tensor):
        return sample.detach().clone()
    return sample.copy() if issubclass(kind, np.ndarray) else sample


def _rows(images: Tensor) -> Counter[bytes]:
    return Counter(bytes(row.contiguous().view(torch.uint8).numpy()) for row in images.detach().cpu())


def _state() -> tuple[Any, Any, Tensor]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002  # old augmentations' own


def _put(state: tuple[Any, Any, Tensor]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])  # noqa: NPY002
    torch.set_rng_state(state[2])


Pass = Iterator[tuple[Tensor, Tensor]]
"""Places (int64, on the CPU) and images, batch by batch."""


def require_images(data: Any) -> None:
    """Raise if there is no image."""
    if len(data) == 0:
        raise DataError("unlabelled has no images; adapt needs some. Check the folder or the filter it was made from.")


def avoid_last_single(batch_size: int, size: int) -> int:
    """Return the batch size, or the next larger one that leaves no single image: it has no batch statistics."""
    while size > 1 and batch_size > 1 and size % batch_size == 1:
        batch_size += 1
    return batch_size


def mixed_batches(places: Sequence[int], batch_size: int) -> list[list[int]]:
    """Return the places batch by batch, in a shuffled order that is always the same."""
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(0)).tolist()
    step = avoid_last_single(batch_size, len(places))
    return [[places[i] for i in order[at : at + step]] for at in range(0, len(order), step)]


class OfLoader:
    """A user's DataLoader over a data set with a length, with its batches, sampler, workers and collate function.

    Args:
        strict: raise where a place does not mean the same image in every pass; else `aligned` says so.

    Attributes:
        doubts: what the caller should warn of.
    """

    def __init__(self, loader: "DataLoader[Any]", strict: bool = True) -> None:
        sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
        subset = getattr(sampler, "indices", None)
        dataset: Any = loader.dataset
        require_images(dataset)
        places = range(len(dataset)) if subset is None else sorted({int(i) for i in subset})
        self.size, self.aligned, self.strict = len(places), True, strict
        self.doubts: list[str] = []
        found = (loader.generator, getattr(sampler, "generator", None))
        self.generators = list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())
        default = loader.collate_fn is default_collate
        self._collate = _Collate(loader.collate_fn, watched=not default)
        self._settings: dict[str, Any] = {
            "dataset": _Placed(dataset, images_only=default),
            "collate_fn": self._collate,
            "num_workers": loader.num_workers,
            "pin_memory": loader.pin_memory,
            "timeout": loader.timeout,
            "worker_init_fn": loader.worker_init_fn,
            "multiprocessing_context": loader.multiprocessing_context,
            "prefetch_factor": loader.prefetch_factor,
            # Persistent workers keep random states, which a run that was killed could not repeat.
            "persistent_workers": False,
        }
        batches: Any = loader.batch_sampler
        self._batches = batches
        self._generator = loader.generator
        self._chunks = mixed_batches(places, loader.batch_size or getattr(batches, "batch_size", None) or 64)
        try:
            self.steps = len(batches)
        except TypeError:
            self.steps = sum(1 for _ in batches)

    def epoch(self) -> Pass:
        """Yield the batches of the next epoch."""
        yield from self._loader(self._batches, self._generator)

    def everything(self) -> Pass:
        """Yield every image once."""
        # A generator of its own: a look at the domain must not change the order of the next epoch.
        yield from self._loader(self._chunks, torch.Generator().manual_seed(0))

    def _loader(self, batches: Any, generator: torch.Generator | None) -> Pass:
        parts: Any = batches if world_size() == 1 else _Parts(batches)
        loader: DataLoader[Any] = DataLoader(**self._settings, batch_sampler=parts, generator=generator)
        at = 0
        for places, item, found in loader:
            images = torch.empty(0) if item is None else images_of(item)
            if found is not None:
                self._object(found)
            # An image without a known place is identified by its position in the pass.
            yield places if self.aligned else torch.arange(at, at + len(images)), images
            at += len(images)
        self._collate.watched = False  # one pass has checked every batch

    def _object(self, found: str) -> None:
        do = (
            "Return one row a sample, in the order of the list that it is given; leave out nothing but samples that "
            "are None."
        )
        if self.strict:
            raise DataError(
                f"the loader's collate_fn {found}; needed: a batch whose images lie as their samples do, because this "
                f"likelihood keeps a label for each by its place in the data set. {do}"
            )
        if self.aligned:
            self.aligned = self._collate.watched = False
            self.doubts.append(
                f"the loader's collate_fn {found}, and places need a batch whose images lie as their samples do; so "
                f"the verdict has no agreement, and step.indices are positions in the pass. {do}"
            )


class _Parts:
    """This process's part of each batch of a sampler; the whole order is drawn before the first batch is loaded.

    What an augmentation draws while images load differs between processes; their order may not.
    """

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        # At the first `next`, as samplers do: the loader draws a seed before it.
        yield from [part(list(batch)) for batch in self.batches]


class _Placed(Dataset[Any]):
    """A data set that gives each item's place with it."""

    def __init__(self, dataset: Any, images_only: bool) -> None:
        self.dataset = dataset
        self.keep: Callable[[Any], Any] = _image if images_only else _whole

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, place: int) -> tuple[int, Any]:
        return int(place), self.keep(self.dataset[place])

    def __getitems__(self, places: list[int]) -> list[tuple[int, Any]]:
        fetch = getattr(self.dataset, "__getitems__", None)
        items = fetch(places) if fetch else [self.dataset[place] for place in places]
        return [(int(place), self.keep(item)) for place, item in zip(places, items, strict=True)]


class _Collate:
    """The user's collate function. It returns the samples' places, the batch, and what is wrong with their order.

    What is wrong is returned, not raised: this may run in a worker, whose errors arrive as bare tracebacks.

    Args:
        watched: call the function a second time for each batch, to check that it keeps the order.
    """

    def __init__(self, collate: Callable[[Any], Any], watched: bool) -> None:
        self.collate, self.watched = collate, watched

    def __call__(self, items: list[tuple[int, Any]]) -> tuple[Tensor, Any, str | None]:
        if not items:  # this process has no part of a small batch
            return torch.empty(0, dtype=torch.int64), None, None
        places, samples = [place for place, _ in items], [sample for _, sample in items]
        there = [at for at, sample in enumerate(samples) if _image(sample) is not None]
        with rewinding_generators() as repeat:
            kept = [copied(samples[at]) for at in there] if self.watched else []
            batch = self.collate(samples)
            try:
                images = images_of(batch)
            except DataError:
                return torch.tensor(places), batch, None  # the caller raises the same error
            if len(images) == len(there):
                # The usual way to skip broken files: the data set returns None, and the collate function drops it.
                places = [places[at] for at in there]
            if len(images) != len(places):
                return torch.tensor(places), batch, f"made {len(images)} images of {len(items)} samples"
            if not self.watched:
                return torch.tensor(places), batch, None
            batch = copied(batch)  # the function may reuse one buffer for all batches
            repeat()
            lost = reorders(self.collate, kept, images_of(batch))
        return torch.tensor(places), batch, "reorders the samples of a batch" if lost else None


def _image(item: Any) -> Any:
    """Return the image of one sample before it is collated, so that not even the collate function sees a label."""
    if isinstance(item, Mapping):
        key = next((k for k in KEYS if k in item), None)
        return item if key is None else _image(item[key])
    return item[0] if isinstance(item, tuple | list) and item else item


def _whole(item: Any) -> Any:
    return item
