"""Quantized shifts: whole multiples of one step per kernel, with any number of levels, three, or two.

    shift[k, i] ≈ step[k] · c[k, i],   c one of `levels` evenly spaced numbers around 0

Several c share a byte, as digits in base `levels`: eight of two levels, five of three, two of fifteen, one of more. A
lookup in a table of 256 rows decodes a byte, so decompression is a gather and a multiply-add on any device. Large
numbers are rare, so a file may use digits of a smaller, odd base, in which the outermost two mean "this much or more",
and store the excess in separate bytes. A Huffman code shortens both.
"""

import math
import zlib
from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from undrift.packs.shift import Shift, as_rows, only

BASES = (3, 5, 15)
"""That fill a byte well: 243, 125 and 225 of its 256 values."""


def per_byte(levels: int) -> int:
    """Return how many digits of this base a byte holds.

    Examples:
        >>> [per_byte(levels) for levels in (2, 3, 7, 15, 255)]
        [8, 5, 2, 2, 1]
    """
    return next(count for count in range(8, 0, -1) if levels**count <= 256)


def packed(digits: Tensor, levels: int) -> Tensor:
    """Return digits packed into bytes, the first digit of a byte being its most significant."""
    count, digits = per_byte(levels), digits.to(torch.uint8)
    padded = torch.cat([digits, digits.new_full((-len(digits) % count,), levels // 2)]).view(-1, count)
    bytes_ = torch.zeros_like(padded[:, 0])
    for place in range(count):
        bytes_ = bytes_ * levels + padded[:, place]
    return bytes_


def numbers(plain: Tensor, levels: int, count: int, dtype: torch.dtype) -> Tensor:
    """Unpack digits into numbers around 0, as a new tensor."""
    if per_byte(levels) == 1 and levels % 2:
        return plain[:count].to(dtype, copy=True).sub_(levels // 2)
    return _table(levels, plain.device, dtype).index_select(0, plain.int()).view(-1)[:count]


@lru_cache(maxsize=32)
def _table(levels: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the digits that each byte stands for, around 0: 256 rows."""
    byte, count = torch.arange(256), per_byte(levels)
    digits = [byte // levels**place % levels for place in reversed(range(count))]
    return (torch.stack(digits, 1) - (levels - 1) / 2).to(device, dtype)


def shortest(plain: Tensor, levels: int, count: int) -> tuple[dict[str, Tensor], int]:
    """Return packed digits as the file holds them, and the base that was shortest there."""
    found = [({"digits": _coded(plain)}, levels)]
    if levels % 2:
        whole = numbers(plain, levels, count, torch.int32)
        for base in (base for base in BASES if base < levels):
            most = base // 2
            near = whole.clamp(-most, most)
            parts = {"digits": _coded(packed(near + most, base))}
            found.append((parts | {"beyond": _coded((whole.abs() - most)[near.abs() == most])}, base))
    return min(found, key=lambda one: sum(len(part) for part in one[0].values()))


def restored(parts: dict[str, Tensor], base: int, levels: int, count: int) -> Tensor:
    """Return the packed digits that a file holds; raise ValueError where they do not fit together."""
    digits = _decoded(parts["digits"], -(-count // per_byte(base)), base ** per_byte(base))
    if base == levels:
        return digits
    most, found = base // 2, numbers(digits, base, count, torch.int32)
    outside = found.abs() == most
    beyond = _decoded(parts["beyond"], int(outside.sum()), levels // 2 - most + 1)
    found[outside] += found[outside].sign() * beyond.int()
    return packed(found + levels // 2, levels)


def _coded(plain: Tensor) -> Tensor:
    """Return bytes Huffman-coded, where that is shorter."""
    whole = plain.to("cpu", torch.uint8).contiguous().numpy().tobytes()
    found = [whole]
    # Runs of one byte are worth looking for only where nearly everything is 0.
    for strategy in (zlib.Z_HUFFMAN_ONLY, zlib.Z_RLE):
        coder = zlib.compressobj(9, zlib.DEFLATED, -15, 9, strategy)
        found.append(coder.compress(whole) + coder.flush())
    shorter = min(found, key=len)
    return torch.frombuffer(bytearray(shorter), dtype=torch.uint8) if shorter else plain.new_empty(0).to(torch.uint8)


def _decoded(coded: Tensor, length: int, values: int) -> Tensor:
    """Return so many bytes below `values`; never more, whatever the file says."""
    digits = coded
    if coded.numel() < length:  # coded, as what is not shorter is stored plain
        decoder = zlib.decompressobj(-15)
        try:
            plain = decoder.decompress(coded.numpy().tobytes(), length + 1)
        except zlib.error as error:
            raise ValueError(f"its digits cannot be decoded: {error}") from error
        digits = torch.frombuffer(bytearray(plain), dtype=torch.uint8) if plain else coded.new_empty(0)
    if digits.numel() != length or (length and int(digits.max()) >= values):
        raise ValueError("its digits do not fit its shape and levels")
    return digits


ROUNDS = 12
"""Alternations between the nearest multiples and the best step; the error falls in each, and by then hardly."""

MOST_LEVELS = 255
"""What a byte tells apart."""

DEAD_ZONE = 0.6
"""The part of a step below which a shift is 0. Rounding has 0.5; zeros are cheap."""

MOST_GAIN = 3.0
"""A kernel of which few shifts are more than 0 does not multiply these further."""

ALIKE = 0.05
"""The part of a step that multiples of it may be off, after they were added to a float32 weight and taken off again."""


class QuantizedShift(Shift):
    """A shift in whole multiples of one step per kernel."""

    kind = "stepped"

    def __init__(self, digits: Tensor, step: Tensor, levels: int, shape: tuple[int, ...]) -> None:
        self.digits, self.step, self.levels, self.shape = digits, step, levels, shape

    @classmethod
    def of(cls, shift: Tensor, levels: int, dead_zone: float = 0.5) -> "QuantizedShift":
        """Return a shift compressed with the steps of least squares.

        Args:
            shift: of a weight; its first axis counts the kernels.
            levels: how many multiples there are; an odd number has 0 among them.
            dead_zone: the part of a step below which a shift is 0, with an odd number of levels; 0.5 rounds.
        """
        assert 2 <= levels <= MOST_LEVELS, levels
        rows = as_rows(shift)
        # From the step of levels that a Gaussian fills evenly to that of least squares.
        step = rows.square().mean(1).sqrt() * (4.0 / levels if levels > 2 else 1.6)
        for _ in range(ROUNDS):
            c = _multiples(rows, step, levels, dead_zone)
            power = c.square().sum(1)
            # A kernel of which nothing is beyond the dead zone halves its step, until something is.
            step = torch.where(power > 0, (rows * c).sum(1) / power.clamp(min=1), step / 2)
        # A shift that was compressed before has its own step, which the alternation need not find.
        least = rows.abs().masked_fill(rows == 0, torch.inf).amin(1).nan_to_num(posinf=0.0) * (2 - levels % 2)
        step = torch.where(_error(rows, least, levels, dead_zone) < _error(rows, step, levels, dead_zone), least, step)
        return cls._with(_multiples(rows, step, levels, dead_zone), step, levels, tuple(shift.shape))

    @classmethod
    def at(cls, shift: Tensor, step: Tensor) -> "QuantizedShift":
        """Return a shift in multiples of about these steps, one per kernel.

        What was below a step is lost, so the steps grow until each kernel's shift has its whole length again along its
        own direction: ⟨restored, shift⟩ = ⟨shift, shift⟩. Rounding errors of a thousand weights cancel in a sum, but a
        shift that is too short everywhere does not, which is what least squares gives.
        """
        rows = as_rows(shift)
        c, own = quantize(rows, step)
        power = (rows * c).sum(1)
        whole = rows.square().sum(1) / power.clamp(min=torch.finfo(torch.float32).tiny)
        exact = (rows - own.unsqueeze(1) * c).abs().amax(1) <= 2 * ALIKE * own
        grown = torch.where(exact, own, torch.minimum(whole, MOST_GAIN * own))
        # As the file holds it.
        own = torch.where(power > 0, grown, 0.0).to(torch.bfloat16).float()
        return cls._with(c, own, 2 * max(1, int(c.abs().max())) + 1, tuple(shift.shape))

    @classmethod
    def _with(cls, c: Tensor, step: Tensor, levels: int, shape: tuple[int, ...]) -> "QuantizedShift":
        digits = (c + (levels - 1) / 2).round().to(torch.uint8).flatten()
        return cls(packed(digits, levels), step, levels, shape)

    def to(self, device: torch.device | str) -> "QuantizedShift":
        """Return the same shift on a device."""
        return QuantizedShift(self.digits.to(device), self.step.to(device), self.levels, self.shape)

    def tensors(self) -> dict[str, Tensor]:
        """Return the packed digits and the steps."""
        return {"digits": self.digits, "step": self.step}

    def added_to(self, source: Tensor) -> Tensor:
        """Return source + shift."""
        wide = torch.promote_types(source.dtype, torch.float32)
        c = numbers(self.digits, self.levels, source.numel(), wide).view(len(self.step), -1)
        rows = source.detach().to(wide).reshape(c.shape)
        # In place: c is ours, and a network's worth of memory need not be asked for twice.
        return c.mul_(self.step.to(wide).unsqueeze(1)).add_(rows).view(self.shape).to(source.dtype)

    def stored(self) -> dict[str, Tensor]:
        """Return digits and steps, as short as a Huffman code makes them."""
        half = self.step.to(torch.bfloat16)
        step = half if torch.equal(half.float(), self.step) else self.step
        return {**self._shortest[0], "step": step.cpu()}

    def described(self) -> dict[str, Any]:
        """Return how many levels there are, and in which base the file's digits are where that is another."""
        base = self._shortest[1]
        return {"levels": self.levels} | ({} if base == self.levels else {"base": base})

    @cached_property
    def _shortest(self) -> tuple[dict[str, Tensor], int]:
        return shortest(self.digits, self.levels, math.prod(self.shape))

    @classmethod
    def read(
        cls, shape: tuple[int, ...], described: Mapping[str, Any], stored: Mapping[str, Tensor]
    ) -> "QuantizedShift":
        """Return the shift that a file describes."""
        levels = int(described["levels"])
        base = int(described.get("base", levels))
        if not 2 <= levels <= MOST_LEVELS:
            raise ValueError(f"{levels} levels; needed: 2 to {MOST_LEVELS}")
        if base != levels and (base not in BASES or not levels % 2 or base > levels):
            raise ValueError(f"digits of base {base} for {levels} levels")
        half = "step" in stored and stored["step"].dtype == torch.bfloat16
        needed: dict[str, tuple[torch.dtype, tuple[int, ...] | None]] = {"digits": (torch.uint8, None)}
        needed |= {} if base == levels else {"beyond": (torch.uint8, None)}
        needed["step"] = torch.bfloat16 if half else torch.float32, (shape[0],)
        *parts, step = only(stored, **needed)
        digits = restored(dict(zip(needed, parts, strict=False)), base, levels, math.prod(shape))
        return cls(digits, step.float(), levels, shape)


def quantize(rows: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """Return shifts as whole multiples, and their steps: the given ones, or larger where the multiples do not fit.

    A kernel whose largest shift is beyond the levels gets a longer step. One that has been in multiples of a step not
    much finer than this keeps them: a pack that was loaded and saved again loses nothing.
    """
    most = (MOST_LEVELS - 1) // 2
    own = torch.maximum(step.to(rows), rows.abs().amax(1) / most)
    least = rows.abs().masked_fill(rows.abs() < own.unsqueeze(1) / 4, torch.inf).amin(1).nan_to_num(posinf=0.0)
    before = _multiples(rows, least, MOST_LEVELS, 0.5)
    finer = (before * rows).sum(1) / before.square().sum(1).clamp(min=1)
    off = (rows - finer.unsqueeze(1) * before).abs().amax(1)
    own = torch.where((least > 0) & (off <= ALIKE * finer), finer, own)
    return _multiples(rows, own, MOST_LEVELS, DEAD_ZONE), own


def _multiples(rows: Tensor, step: Tensor, levels: int, dead_zone: float) -> Tensor:
    """Return the multiple of its kernel's step that each shift becomes."""
    most = (levels - 1) / 2
    ratio = rows / step.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1)
    if levels % 2 == 0:
        return (ratio.floor() + 0.5).clamp_(-most, most)
    return torch.where(ratio.abs() > dead_zone, ratio.sign() * ratio.abs().round().clamp_(1, most), 0.0)


def _error(rows: Tensor, step: Tensor, levels: int, dead_zone: float) -> Tensor:
    """Return the squared error of each kernel's shifts in multiples of a step."""
    return (rows - step.unsqueeze(1) * _multiples(rows, step, levels, dead_zone)).square().sum(1)
