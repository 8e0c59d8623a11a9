"""A collate function asked again as if for the first time: the same samples, and what it draws from put back."""

import copy
import pickle
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Repeated:
    """A collate function that can be asked again about the samples of one batch; made before it is asked at all.

    The global generators of torch (on a CPU), NumPy and Python are put back. A generator of its own is not known here:
    with one it makes another batch each time.
    """

    def __init__(self, collate: Callable[[Any], Any], samples: Sequence[Any]) -> None:
        self.collate, self._samples, self._before = collate, [copied(sample) for sample in samples], _state()

    def drew(self) -> bool:
        """Return whether any number was drawn since the object was made."""
        return pickle.dumps(self._before) != pickle.dumps(_state())

    def only(self, places: Sequence[int]) -> "Repeated":
        """Return the same for some of the samples."""
        some = copy.copy(self)
        some._samples = [self._samples[at] for at in places]
        return some

    def __call__(self, order: Sequence[int]) -> Any:
        """Return what it makes of the samples in this order, with the draws of the first time; they leave no trace."""
        now = _state()
        _put(self._before)
        try:
            return self.collate([copied(self._samples[at]) for at in order])
        finally:
            _put(now)


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


def _state() -> tuple[Any, Any, Any]:
    numpy = np.random.get_state()  # noqa: NPY002  # the one that old augmentations draw from
    return random.getstate(), numpy, torch.get_rng_state().numpy()


def _put(state: tuple[Any, Any, Any]) -> None:
    python, numpy, cpu = state
    random.setstate(python)
    np.random.set_state(numpy)  # noqa: NPY002
    torch.set_rng_state(torch.from_numpy(cpu))
