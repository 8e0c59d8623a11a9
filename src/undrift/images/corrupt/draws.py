"""Draw random numbers per image, independent of its batch.

Every image has a 64-bit key: a hash of seed, corruption and the image's index. It does not depend on severity, so an
image keeps its grain, angle and crop as severity grows. Single numbers (an angle, a corner) come directly from the key;
fields (noise per pixel) come from a generator seeded with it. Fields are drawn one image at a time in one shape, so an
image's noise is the same alone, in any batch and in any worker process. Global generators are not touched.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: the step of SplitMix64


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return SplitMix64's output for each state; neighbouring states give unrelated outputs."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(state ^ (state >> np.uint64(31)))


@dataclass(frozen=True)
class Draws:
    """The random numbers of some consecutive images under one corruption.

    Args:
        keys: one 64-bit key per image.
        device: where fields are drawn; a CPU and a GPU give different (equally good) fields.
    """

    keys: npt.NDArray[np.uint64]
    device: torch.device

    @classmethod
    def of(cls, seed: int, name: str, first: int, count: int, device: torch.device) -> Draws:
        """Return the draws of images `first` … `first + count - 1`."""
        digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
        start = np.full(1, int.from_bytes(digest, "little"), dtype=np.uint64)
        index = np.arange(first, first + count, dtype=np.uint64)
        return cls(_mix(start + (index + np.uint64(1)) * _GOLDEN), device)

    def numbers(self, count: int) -> npt.NDArray[np.float64]:
        """Return `count` uniform numbers in [0, 1) per image, equal on every device: shape (images, count)."""
        step = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
        bits = _mix(self.keys[:, None] + step[None])
        return np.asarray((bits >> np.uint64(11)) * 2.0**-53, dtype=np.float64)

    def uniform(self, *shape: int) -> Tensor:
        """Return a field of uniform numbers in [0, 1) for each image: shape (images, *shape)."""
        return self._field(shape, lambda field, generator: field.uniform_(generator=generator))

    def normal(self, *shape: int) -> Tensor:
        """Return a field of standard normal numbers for each image: shape (images, *shape)."""
        return self._field(shape, lambda field, generator: field.normal_(generator=generator))

    def poisson(self, rate: Tensor) -> Tensor:
        """Return Poisson counts at the given rates, (images, …)."""
        rates = iter(rate)
        return self._field(
            tuple(rate.shape[1:]),
            lambda field, generator: field.copy_(torch.poisson(next(rates), generator=generator)),
        )

    def _field(self, shape: tuple[int, ...], fill: Callable[[Tensor, torch.Generator], Any]) -> Tensor:
        fields = torch.empty(len(self.keys), *shape, device=self.device)
        generator = torch.Generator(self.device)
        for field, key in zip(fields, self.keys.tolist(), strict=True):
            fill(field, generator.manual_seed(key))
        return fields
