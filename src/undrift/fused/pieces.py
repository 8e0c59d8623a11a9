"""ε on a CPU, drawn in pieces that stay in the cores' caches, in place, in the output's own memory order.

Nearly forty operators make a pair of numbers. Over a whole tensor each of them is a pass over memory; here a piece goes
through all of them before the next.
"""

import math
import threading
from typing import Any

import torch
from torch import Tensor

from undrift.fused.epsilon import ANGLE_BITS, COSINE, FACTORS, HALF, SHIFTS, SINE, signed

# Pairs a thread: few enough for a shared cache, and many enough that forty calls of PyTorch's weigh little beside them.
PIECE = 1 << 17
# Said each time: torch has defaults that a user may change.
FLOAT: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
WORD: dict[str, Any] = {"dtype": torch.int32, "device": "cpu"}
_LEFT = 31 - ANGLE_BITS  # bits for the radius
_ROW = 1 << 10
_own = threading.local()


def normal(key: Tensor, shape: torch.Size, first_row: int) -> Tensor:
    """Return what `epsilon.normal` returns, up to rounding."""
    out = torch.empty(shape, **FLOAT)
    fill(out.view(shape[0], shape[1:].numel()), key, first_row)
    return out


@torch.inference_mode()  # less of PyTorch's between a call and its loop; what is written to was made outside
def fill(out: Tensor, key: Tensor, first_row: int, energy: Tensor | None = None) -> None:
    """Write ε, or √energy·ε, into rows of numbers; energy is rows × 1 × width, for a half row of so many widths."""
    low, high = _words(key)
    upper = torch.full((), signed(high), **WORD)
    rows, numbers = out.shape
    half = (numbers + 1) // 2
    width = 1 if energy is None else energy.shape[2]
    # A piece is some rows' pairs, or a part of one row's: whole widths of it, or a part of one that is larger.
    most = PIECE * torch.get_num_threads()
    together = max(1, most // max(1, half))
    step = max(1, half) if together > 1 else max(min(half, most - most % width), min(most, width))
    for row in range(0, rows, together):
        some, column = out[row : row + together], 0
        while column < half:
            at = column % width
            end = min(half, column + step, half if step >= width else column - at + width)
            its = None if energy is None else energy[row : row + together, :, at : at + end - column]
            first = some[:, column:end]
            _count((first_row + row) * half + column + low, first.numel())
            _draw(first, some[:, half + column : half + end], upper, its)
            column = end


@torch.inference_mode()
def fill_last(out: Tensor, key: Tensor, first_row: int, energy: Tensor | None = None) -> None:
    """Write ε, or √energy·ε, into images × positions × an even number of channels; energy is vectors × 1 × 1."""
    low, high = _words(key)
    upper = torch.full((), signed(high), **WORD)
    images, positions, channels = out.shape
    vectors, half = out.view(-1, channels), channels // 2
    # The counter of image n, channel c, position p is (n · half + c) · positions + p.
    image = torch.arange(images, **WORD)[:, None] * signed(half * positions)
    at = (image + torch.arange(positions, **WORD)).view(-1, 1)
    at += signed(first_row * half * positions + low)
    channel = torch.arange(half, **WORD) * positions
    step = max(1, PIECE * torch.get_num_threads() // max(1, half))
    for row in range(0, len(vectors), step):
        some, its = vectors[row : row + step], None if energy is None else energy[row : row + step]
        first = some[:, :half]
        torch.add(channel, at[row : row + step], out=_buffers(first.numel())[0].view_as(first))
        _draw(first, some[:, half:], upper, its)


def _words(key: Tensor) -> tuple[int, int]:
    """Return the lower and upper word of a key."""
    word = int(key)
    return word % 2**32, (word >> 32) % 2**32


class _Constants:
    """Numbers as tensors: beside a tensor PyTorch makes one of each Python number, which takes longer than the rest."""

    def __init__(self, size: int) -> None:
        def words(*of: int) -> list[Tensor]:
            return [torch.tensor(signed(word), **WORD) for word in of]

        self.columns = torch.arange(_ROW, **WORD)
        self.rows = torch.arange(0, size, _ROW, **WORD)[:, None]
        self.shifts, self.masks = words(*SHIFTS), words(*(2 ** (32 - bits) - 1 for bits in SHIFTS))
        self.factors = words(*FACTORS)
        self.taken, self.radius, self.angle, self.turn, self.sign = words(
            32 - _LEFT, 2**_LEFT - 1, 2**ANGLE_BITS - 1, _LEFT, 2**31
        )
        self.half = torch.tensor(HALF, **FLOAT)
        # u − 1 at a radius of 0 bits: exact, as u is.
        self.least = torch.tensor(0.5 * 2.0**-_LEFT - 1, **FLOAT)
        # For the natural logarithm: log1p takes less time than log2.
        self.sine, self.cosine = (
            tuple(torch.tensor(c / math.sqrt(math.log(2)), **FLOAT) for c in of) for of in (SINE, COSINE)
        )


def _buffers(size: int) -> tuple[Tensor, ...]:
    """Return four of this thread's buffers, of that size, as words and as numbers."""
    if getattr(_own, "size", 0) < size:
        # They outlive the call: what inference mode makes could not be written to outside of it.
        with torch.inference_mode(False):
            whole = -(-size // _ROW) * _ROW
            _own.whole = [torch.empty(whole, **WORD) for _ in range(4)]
            _own.constants = _Constants(whole)
        _own.size, _own.views = whole, ()
    if not _own.views or len(_own.views[0]) != size:
        words = [b[:size] for b in _own.whole]
        _own.views = (*words, *(b.view(torch.float32) for b in words))
    views: tuple[Tensor, ...] = _own.views
    return views


def _count(start: int, size: int) -> None:
    """Write the counters from start on into the first buffer: sums of two short rows, which are read from a cache."""
    _buffers(size)
    k, rows = _own.constants, -(-size // _ROW)
    torch.add(k.rows[:rows], k.columns + signed(start), out=_own.whole[0][: rows * _ROW].view(rows, _ROW))


def _xor_shift(z: Tensor, step: int, spare: Tensor) -> None:
    # >> keeps the sign of an int32; the mixer shifts zeros in.
    k = _own.constants
    z.bitwise_xor_(torch.bitwise_right_shift(z, k.shifts[step], out=spare).bitwise_and_(k.masks[step]))


def _draw(first: Tensor, second: Tensor, upper: Tensor, energy: Tensor | None) -> None:
    """Write pairs for the counters in the first buffer: sines into first, cosines into second, which may be shorter.

    The key's lower word was added to the counters; its upper word comes now.
    """
    z, spare, _, bits, turned, value, angle, radius = _buffers(first.numel())
    k = _own.constants
    for step, factor in enumerate(k.factors):
        _xor_shift(z, step, spare)
        z.mul_(factor)
        if step == 0:
            z.add_(upper)
    _xor_shift(z, len(FACTORS), spare)
    radius.copy_(torch.bitwise_right_shift(z, k.taken, out=spare).bitwise_and_(k.radius))
    torch.add(k.least, radius, alpha=2.0**-_LEFT, out=radius).log1p_()
    if energy is None:
        radius.neg_()
    else:
        radius.view(len(energy), -1, energy.shape[2]).mul_(-energy)
    radius.sqrt_()
    angle.copy_(torch.bitwise_and(z, k.angle, out=spare)).sub_(k.half)
    # The bit above the angle is the cosine's sign: it goes where a float32 has its own.
    z.bitwise_left_shift_(k.turn).bitwise_and_(k.sign).bitwise_xor_(bits)
    radius.mul_(angle)
    angle.mul_(angle)
    _polynomial(k.sine, angle, value)
    torch.mul(value.view_as(first), radius.view_as(first), out=first)
    _polynomial(k.cosine, angle, value)
    width = second.shape[1]
    torch.mul(value.view_as(first)[:, :width], turned.view_as(first)[:, :width], out=second)


def _polynomial(coefficients: tuple[Tensor, ...], square: Tensor, out: Tensor) -> None:
    torch.add(coefficients[-2], square, alpha=float(coefficients[-1]), out=out)
    for c in reversed(coefficients[:-2]):
        torch.addcmul(c, out, square, out=out)
