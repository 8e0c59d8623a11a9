"""Quantized shifts: whole multiples of one step per kernel, with any number of levels, three, or two.

    shift[k, i] ≈ step[k] · c[k, i],   c one of `levels` evenly spaced numbers around 0

Several c share a byte, as digits in base `levels`. A lookup in a table of 256 rows decodes a byte, so decompression is
a gather and a multiply-add on any device.
"""

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from undrift.packs.digits import BASES, numbers, packed, restored, shortest
from undrift.packs.shift import Shift, as_rows, only

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
