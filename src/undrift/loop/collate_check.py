"""Whether a collate function leaves each sample at its place in the batch.

Nobody says so, and nothing shows it afterwards: a label that is kept for a place goes to another image. So the function
is asked a second time about the same samples, in another order, with the same random numbers. The rows that it makes
must follow; where the same rows come back at other places, it sorts or shuffles. Anything else proves nothing: an
augmentation whose draws go by position makes other rows.
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
def again() -> Iterator[Callable[[], None]]:
    """Give what puts the global generators back to where they stand now; at the end they are as they were before that.

    Torch's on a CPU, NumPy's and Python's: those that a collate function draws from, if it has none of its own.
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
    """Return whether a collate function was seen to put samples at other places than their own.

    Args:
        samples: of one batch, copies of its own; the random numbers are those of the first time.
        images: what it made of them then.
    """
    count = len(images)
    if count < 3:
        return False
    # All but the last go one on: a fixed order of its own (reversed, say) would have to fit this one by chance.
    other = [count - 2, *range(count - 2), count - 1]
    try:
        made = images_of(collate([samples[at] for at in other]))
    except Exception:  # whatever it raises the second time, the batch itself was made
        return False
    if made.shape != images.shape or made.dtype != images.dtype or torch.equal(made, images[other]):
        return False
    return _rows(made) == _rows(images)


def copied(sample: Any) -> Any:
    """Return the sample with its containers and tensors copied: a collate function may change them in place.

    What it does not know is handed on untouched, labels among it.
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
