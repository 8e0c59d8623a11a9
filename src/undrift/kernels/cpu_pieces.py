"""Draw ε on a CPU in pieces that fit the cores' caches, in place, in the output's own memory order.

A pair of numbers takes nearly thirty operators. Over a whole tensor each of them is a pass over memory; here a piece
goes through all of them before the next.
"""

import math
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from undrift.kernels.epsilon import BITS, COSINE, JOINED, SINE, columns, rows, signed

# Pairs a thread: few enough for a shared cache, many enough that thirty calls of PyTorch's weigh little beside them.
PIECE = 1 << 17
# Said each time: torch has defaults that a user may change.
FLOAT: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
WORD: dict[str, Any] = {"dtype": torch.int32, "device": "cpu"}
_own = threading.local()


@torch.inference_mode()  # less of PyTorch's between a call and its loop; what is written to was made outside
def fill(out: Tensor, key: Tensor, first_row: int, energy: Tensor | None = None) -> None:
    """Write ε, or √energy·ε, into images × channels × positions; energy has one channel. Vectors have one position."""
    images, channels, positions = out.shape
    half = (channels + 1) // 2
    row = rows(key, images * positions, first_row).view(images, 1, positions)
    column = columns(key, half)[:, None]
    for image, channel, place in _pieces(images, half, positions):
        first = out[image, channel, place]
        second = out[image, half + channel.start : half + channel.stop, place]
        torch.bitwise_xor(row[image, :, place], column[channel], out=_buffers(first.numel())[0].view(first.shape))
        _draw(first, second, None if energy is None else energy[image, :, place])


def _pieces(images: int, half: int, positions: int) -> Iterator[tuple[slice, slice, slice]]:
    """Give some images, or some channels of one image, or some positions of one channel, until all were given."""
    most = PIECE * torch.get_num_threads()
    wide = max(1, min(positions, most))
    high = max(1, min(half, most // wide))
    together = max(1, most // max(1, high * wide)) if high >= half and wide >= positions else 1
    for image in range(0, images, together):
        for channel in range(0, half, high):
            for place in range(0, positions, wide):
                yield (
                    slice(image, image + together),
                    slice(channel, min(half, channel + high)),
                    slice(place, place + wide),
                )


class _Constants:
    """Numbers as tensors: beside a tensor PyTorch makes one of each Python number, which takes longer than the rest."""

    def __init__(self) -> None:
        def words(*of: int) -> list[Tensor]:
            return [torch.tensor(signed(word), **WORD) for word in of]

        self.first, self.second = words(*JOINED.factors)
        self.shift, self.mask = words(JOINED.shifts[0], 2 ** (32 - JOINED.shifts[0]) - 1)
        self.fraction, self.others = words(2**BITS - 1, 32 - BITS)
        # u − 1 at a radius of 0 bits: exact, as u is.
        self.least = torch.tensor(0.5 * 2.0**-BITS - 1, **FLOAT)
        self.start = torch.tensor(-1.0, **FLOAT)
        # For the natural logarithm: log1p takes less time than log2.
        self.sine, self.cosine = (
            tuple(torch.tensor(c / math.sqrt(math.log(2)), **FLOAT) for c in of) for of in (SINE, COSINE)
        )


def _buffers(size: int) -> tuple[Tensor, ...]:
    """Return four of this thread's buffers, of that size, as words and as numbers."""
    if getattr(_own, "size", 0) < size:
        # They outlive the call: what inference mode makes could not be written to outside of it.
        with torch.inference_mode(False):
            _own.whole = [torch.empty(size, **WORD) for _ in range(4)]
            _own.constants = _Constants()
        _own.size, _own.views = size, ()
    if not _own.views or len(_own.views[0]) != size:
        words = [b[:size] for b in _own.whole]
        _own.views = (*words, *(b.view(torch.float32) for b in words))
    views: tuple[Tensor, ...] = _own.views
    return views


def _draw(first: Tensor, second: Tensor, energy: Tensor | None) -> None:
    """Write pairs for the words in the first buffer: sines into first, cosines into second, which may be shorter."""
    z, spare, _, _, value, square, angle, radius = _buffers(first.numel())
    k = _own.constants
    z.mul_(k.first)
    # >> keeps the sign of an int32; the mixer shifts zeros in.
    z.bitwise_xor_(torch.bitwise_right_shift(z, k.shift, out=spare).bitwise_and_(k.mask)).mul_(k.second)
    radius.copy_(torch.bitwise_and(z, k.fraction, out=spare))
    torch.add(k.least, radius, alpha=2.0**-BITS, out=radius).log1p_()
    if energy is None:
        radius.neg_()
    else:
        radius.view(first.shape).mul_(-energy)
    radius.sqrt_()
    angle.copy_(torch.bitwise_right_shift(z, k.others, out=spare).bitwise_and_(k.fraction))
    torch.add(k.start, angle, alpha=2.0 ** (1 - BITS), out=angle)
    torch.mul(angle, angle, out=square)
    _polynomial(k.cosine, square, value)
    height = second.shape[1]
    torch.mul(value.view(first.shape)[:, :height], radius.view(first.shape)[:, :height], out=second)
    radius.mul_(angle)
    _polynomial(k.sine, square, value)
    torch.mul(value.view(first.shape), radius.view(first.shape), out=first)


def _polynomial(coefficients: tuple[Tensor, ...], square: Tensor, out: Tensor) -> None:
    torch.add(coefficients[-2], square, alpha=float(coefficients[-1]), out=out)
    for c in reversed(coefficients[:-2]):
        torch.addcmul(c, out, square, out=out)
