"""Shifts as whole multiples of one step per kernel: signs, three levels, or more.

    shift[k, i] ≈ step[k] · c[k, i],   c one of `levels` evenly spaced numbers around 0

Several c share a byte, as digits of a number in base `levels`: eight signs, five of three levels, four of four, two of
sixteen. One look into a table of 256 rows undoes a byte, so decompression is a gather and a multiply-add on any device.
Wide dead zones make small shifts 0; the bytes then have a skewed distribution, and a Huffman code shortens the file.
"""

import math
import zlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from undrift.packs.shift import Shift, as_rows, only

ROUNDS = 12
"""Alternations between the nearest multiples and the best step; the error falls in each, and by then hardly."""

MOST_LEVELS = 16


class SteppedShift(Shift):
    """A shift in whole multiples of one step per kernel."""

    kind = "stepped"

    def __init__(self, digits: Tensor, step: Tensor, levels: int, shape: tuple[int, ...]) -> None:
        self.digits, self.step, self.levels, self.shape = digits, step, levels, shape

    @classmethod
    def of(cls, shift: Tensor, levels: int, dead_zone: float = 0.5) -> "SteppedShift":
        """Return a shift compressed with the steps of least squares.

        Args:
            shift: of a weight; its first axis counts the kernels.
            levels: how many multiples there are; an odd number has 0 among them.
            dead_zone: the part of a step below which a shift is 0, with an odd number of levels; 0.5 rounds.
        """
        assert 2 <= levels <= MOST_LEVELS, levels
        rows = as_rows(shift)
        most = (levels - 1) / 2
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
        c = _multiples(rows, step, levels, dead_zone)
        return cls(_packed((c + most).round().to(torch.uint8).flatten(), levels), step, levels, tuple(shift.shape))

    def to(self, device: torch.device | str) -> "SteppedShift":
        """Return the same shift on a device."""
        return SteppedShift(self.digits.to(device), self.step.to(device), self.levels, self.shape)

    def tensors(self) -> dict[str, Tensor]:
        """Return the packed digits and the steps."""
        return {"digits": self.digits, "step": self.step}

    def added_to(self, source: Tensor) -> Tensor:
        """Return source + shift."""
        wide = torch.promote_types(source.dtype, torch.float32)
        table = _table(self.levels, self.digits.device, wide)
        c = table.index_select(0, self.digits.int()).view(-1)[: source.numel()].view(len(self.step), -1)
        rows = source.detach().to(wide).reshape(c.shape)
        # In place: c is ours, and a network's worth of memory need not be asked for twice.
        return c.mul_(self.step.to(wide).unsqueeze(1)).add_(rows).view(self.shape).to(source.dtype)

    def stored(self) -> dict[str, Tensor]:
        """Return digits and steps; the digits Huffman-coded where that is shorter."""
        plain = self.digits.cpu().contiguous().numpy().tobytes()
        coder = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zlib.Z_RLE)
        coded = coder.compress(plain) + coder.flush()
        shorter = min(plain, coded, key=len)
        return {"digits": torch.frombuffer(bytearray(shorter), dtype=torch.uint8), "step": self.step.cpu()}

    def described(self) -> dict[str, Any]:
        """Return how many levels there are."""
        return {"levels": self.levels}

    @classmethod
    def read(cls, shape: tuple[int, ...], described: Mapping[str, Any], stored: Mapping[str, Tensor]) -> "SteppedShift":
        """Return the shift that a file describes."""
        levels = int(described["levels"])
        if not 2 <= levels <= MOST_LEVELS:
            raise ValueError(f"{levels} levels; needed: 2 to {MOST_LEVELS}")
        digits, step = only(stored, digits=(torch.uint8, None), step=(torch.float32, (shape[0],)))
        length = -(-math.prod(shape) // per_byte(levels))
        if digits.numel() < length:  # coded, as what is not shorter is stored plain
            digits = _decoded(digits, length)
        if digits.numel() != length or int(digits.max()) >= levels ** per_byte(levels):
            raise ValueError("its digits do not fit its shape and levels")
        return cls(digits, step, levels, shape)


def per_byte(levels: int) -> int:
    """Return how many digits of this base a byte holds.

    Examples:
        >>> [per_byte(levels) for levels in (2, 3, 4, 7, 16)]
        [8, 5, 4, 2, 2]
    """
    return next(count for count in range(8, 0, -1) if levels**count <= 256)


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


def _packed(digits: Tensor, levels: int) -> Tensor:
    """Return digits packed into bytes, the first digit of a byte being its most significant."""
    count = per_byte(levels)
    padded = torch.cat([digits, digits.new_full((-len(digits) % count,), levels // 2)]).view(-1, count)
    packed = torch.zeros_like(padded[:, 0])
    for place in range(count):
        packed = packed * levels + padded[:, place]
    return packed


@lru_cache(maxsize=32)
def _table(levels: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the multiples that each byte stands for: 256 rows."""
    byte, count = torch.arange(256), per_byte(levels)
    digits = [byte // levels**place % levels for place in reversed(range(count))]
    return (torch.stack(digits, 1) - (levels - 1) / 2).to(device, dtype)


def _decoded(coded: Tensor, length: int) -> Tensor:
    """Return the bytes of a Huffman code; never more than asked for, whatever the file says."""
    decoder = zlib.decompressobj(-15)
    try:
        plain = decoder.decompress(coded.numpy().tobytes(), length + 1)
    except zlib.error as error:
        raise ValueError(f"its digits cannot be decoded: {error}") from error
    return torch.frombuffer(bytearray(plain), dtype=torch.uint8) if plain else coded.new_empty(0)
