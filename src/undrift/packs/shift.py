"""The compressed shift of one trained weight, which a pack holds instead of the weight.

    w_adapted ≈ w_source + shift

A shift is kept compressed, in the file and in memory, and decompressed as it is added: `shift.added_to(source)`. How
it is compressed is up to the subclass: `QuantizedShift` and `LowRankShift`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

_KINDS: "dict[str, type[Shift]]" = {}


class Shift(ABC):
    """The compressed shift of one weight.

    Attributes:
        kind: its name in a pack's header.
        shape: of the weight.
    """

    kind: ClassVar[str]
    shape: tuple[int, ...]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _KINDS[cls.kind] = cls

    @abstractmethod
    def to(self, device: torch.device | str) -> "Shift":
        """Return the same shift on a device."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors it is held in while in use, by name."""

    @abstractmethod
    def added_to(self, source: Tensor) -> Tensor:
        """Return source + shift as a new tensor, on the source's device and in its precision.

        The shift is to be on that device already. Half precision is added in float32 and rounded once.
        """

    @abstractmethod
    def stored(self) -> dict[str, Tensor]:
        """Return the tensors of the file, by name; the reverse of `read`."""

    @abstractmethod
    def described(self) -> dict[str, Any]:
        """Return what else `read` needs, as plain JSON values."""

    @classmethod
    @abstractmethod
    def read(cls, shape: tuple[int, ...], described: Mapping[str, Any], stored: Mapping[str, Tensor]) -> "Shift":
        """Return the shift that a file describes; raise ValueError where the two do not fit together."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def dense(self) -> Tensor:
        """Return the shift itself, in float32."""
        device = next(iter(self.tensors().values())).device
        return self.added_to(torch.zeros(self.shape, device=device))


def described(shift: Shift) -> dict[str, Any]:
    """Return a shift's entry in a pack's header."""
    return {"kind": shift.kind, "shape": list(shift.shape), **shift.described()}


def read(entry: Mapping[str, Any], stored: Mapping[str, Tensor]) -> Shift:
    """Return the shift of a pack's header and tensors; raise ValueError where they do not fit together."""
    kind, shape = entry["kind"], tuple(int(size) for size in entry["shape"])
    if kind not in _KINDS:
        raise ValueError(f"no compression is called {kind!r}; known: {', '.join(sorted(_KINDS))}")
    if not shape or min(shape) < 1:
        raise ValueError(f"a weight of shape {shape}")
    return _KINDS[kind].read(shape, entry, stored)


def as_rows(weight: Tensor) -> Tensor:
    """Return a weight as float32 rows: one row per entry of the first axis, which is a kernel of most layers."""
    return weight.detach().to(torch.float32).reshape(weight.shape[0], -1)


def only(stored: Mapping[str, Tensor], **needed: tuple[torch.dtype, tuple[int, ...] | None]) -> list[Tensor]:
    """Return the named tensors in this order; raise ValueError unless they are there with this type and shape."""
    if stored.keys() != needed.keys():
        raise ValueError(f"holds {', '.join(sorted(stored))} instead of {', '.join(needed)}")
    for name, (dtype, shape) in needed.items():
        tensor = stored[name]
        if tensor.dtype != dtype or (shape is not None and tuple(tensor.shape) != shape):
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)} instead of {dtype} {shape or 'in a row'}")
        if dtype.is_floating_point and not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} holds NaN or infinity")
    return [stored[name] for name in needed]


def row_length(shape: tuple[int, ...]) -> int:
    """Return how many weights a row of a weight of this shape has."""
    return math.prod(shape[1:])
