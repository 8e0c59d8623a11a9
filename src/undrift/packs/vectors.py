"""Join the vectors of a large network in one row of bytes: changes of norm state and biases, and log σ².

Each vector is small, but together they are half a megabyte for a ResNet-50. A pack holds the difference from the
source's vector in multiples of a power of two: a step of about 2⁻¹¹ of the adapted value, or of the deviation for a
mean that a norm layer subtracts. log σ² is stored in multiples of 2⁻⁷ and not as a difference, so that it can be read
without a network. The bytes of the float32 values are stored plane by plane, first bytes of all values first, and
deflated, so values that hardly changed take a few bits.
"""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from undrift.packs.shift import Shift, only
from undrift.posterior.perturbed import Perturbed

MANY = 16_384
"""Values from which on they are worth it; the vectors of smaller networks stay exact."""

STEP = 12
"""By how many powers of two a step is below what is above the adapted value."""

LOG_VAR_STEP = 2.0**-7

MEAN, VAR, LOG_VAR = "running_mean", "running_var", "log_var"


class VectorShift(Shift):
    """By how much a vector differs from the source's."""

    kind = "vector"

    def __init__(self, change: Tensor) -> None:
        self.change, self.shape = change, tuple(change.shape)

    @classmethod
    def of(cls, source: Tensor, adapted: Tensor, size: Tensor) -> "VectorShift":
        """Return the difference in multiples of a step, a small part of `size`."""
        change = adapted.double() - source.double()
        least = torch.where(size > 0, torch.frexp(size.double())[1] - STEP, -1000)  # beside 0 nothing is small
        step = torch.exp2(torch.maximum(least, torch.frexp(change)[1] - 24).double())
        return cls(((change / step).round() * step).float())

    def to(self, device: torch.device | str) -> "VectorShift":
        """Return the same shift on a device."""
        return VectorShift(self.change.to(device))

    def tensors(self) -> dict[str, Tensor]:
        """Return the differences."""
        return {"change": self.change}

    def added_to(self, source: Tensor) -> Tensor:
        """Return source + shift."""
        wide = torch.promote_types(source.dtype, torch.float32)
        return (source.detach().to(wide) + self.change.to(wide)).to(source.dtype)

    def stored(self) -> dict[str, Tensor]:
        """Return the differences; a pack joins those of all vectors instead."""
        return {"change": self.change.cpu()}

    def described(self) -> dict[str, Any]:
        """Return nothing: they are plain numbers."""
        return {}

    @classmethod
    def read(cls, shape: tuple[int, ...], _described: Mapping[str, Any], stored: Mapping[str, Tensor]) -> "VectorShift":
        """Return the shift that a file describes."""
        return cls(*only(stored, change=(torch.float32, shape)))


def vector_shifts(model: Perturbed, kept: Mapping[str, Tensor]) -> dict[str, Shift]:
    """Return the shifts of a network's vectors by name; none where they are few.

    Args:
        kept: the tensors of the domain by name.
    """
    pairs = {}
    for held in (*model.norms, *model.trained):
        inside, away = held.tensors(), held.away
        for name, own in (away if model.key.enabled else inside).items():
            full = f"{held.name}.{name}" if held.name else name
            if own is not None and full in kept and kept[full].ndim == 1:
                pairs[full] = own.detach().cpu(), kept[full]
    if sum(len(adapted) for _, adapted in pairs.values()) < MANY:
        return {}
    return {name: VectorShift.of(source, adapted, _size(name, kept)) for name, (source, adapted) in pairs.items()}


def rounded(log_var: Tensor) -> Tensor:
    """Return log σ² rounded; −∞ stays."""
    return torch.where(log_var.isfinite(), (log_var / LOG_VAR_STEP).round() * LOG_VAR_STEP, log_var)


def row_of(vectors: Mapping[str, Tensor]) -> tuple[Tensor, list[Any]]:
    """Return vectors as deflated bytes, and names and lengths for the header."""
    names = sorted(vectors, key=lambda name: name.rpartition(".")[2])  # kind by kind
    planes = torch.cat([vectors[name] for name in names]).view(torch.uint8).view(-1, 4).t().contiguous()
    coded = zlib.compress(planes.numpy().tobytes(), 9)
    return torch.frombuffer(bytearray(coded), dtype=torch.uint8), [[name, len(vectors[name])] for name in names]


def vectors_of(coded: Tensor, described: Sequence[Any]) -> dict[str, Tensor]:
    """Return the vectors of a file; raise ValueError where bytes and header do not fit together."""
    lengths = {str(name): int(length) for name, length in described}
    whole = sum(lengths.values())
    if coded.dtype != torch.uint8 or not lengths or min(lengths.values()) < 1 or len(lengths) != len(described):
        raise ValueError("its joined vectors are not described as they are")
    decoder = zlib.decompressobj()
    try:
        plain = decoder.decompress(coded.numpy().tobytes(), 4 * whole + 1)
    except zlib.error as error:
        raise ValueError(f"its joined vectors cannot be decoded: {error}") from error
    if len(plain) != 4 * whole:
        raise ValueError(f"its joined vectors have {len(plain)} bytes instead of {4 * whole}")
    planes = torch.frombuffer(bytearray(plain), dtype=torch.uint8).view(4, whole)
    values = planes.t().contiguous().view(torch.float32).view(-1)
    parts = values.split(list(lengths.values()))
    return {name: part.clone() for name, part in zip(lengths, parts, strict=True)}


def _size(name: str, kept: Mapping[str, Tensor]) -> Tensor:
    """Return the scale by which an error of a vector is small or large."""
    var = kept.get(name.removesuffix(MEAN) + VAR) if name.endswith(MEAN) else None
    return kept[name].abs() if var is None else var.sqrt()
