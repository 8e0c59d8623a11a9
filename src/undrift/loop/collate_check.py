"""Detect collate functions that reorder the samples of a batch.

Likelihoods keep a label for each index of the data set; after a reordering, labels would silently belong to other
images. So the function is called a second time on the same samples in another order, with the same random numbers. If
it keeps the order, its rows follow the samples. If the same rows come back at other places, it sorts or shuffles. Rows
with other values prove nothing, because an augmentation may depend on the position.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from undrift.posterior.batch import images_of


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
