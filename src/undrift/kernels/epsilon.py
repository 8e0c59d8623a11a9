"""Keys, of a seed and a step by SplitMix64; and ε: standard normal numbers, of a key, a row and a column.

A row is a position of a layer's output (of one image), a column one of its channels. Each has its own word, a hash of
its number and of both words of the key. A pair of numbers comes from the exclusive or of row and column, hashed once
more. So most of the hashing is done once per position and once per channel, not once per number.

Box-Muller turns the mixed word into two normal numbers: its lower 23 bits give a radius, its upper 23 an angle. They
share 14 bits, which are the radius's first and the angle's last: a radius goes with angles 1/512 of a turn apart, whose
sines and cosines have the moments of the whole circle's up to the 511th. The first half of the columns has the sines,
the second the cosines of the same words, so that both halves can be read and written as they lie in memory.

Every implementation and every kind of device computes this function; only the last bits differ, with the device's
logarithm and square root. No value exceeds 5.77, which one normal number in a hundred million does.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# SplitMix64 (Steele, Lea, Flood 2014), as signed 64-bit integers.
GOLDEN = 0x9E3779B97F4A7C15 - 2**64
MIX1 = 0xBF58476D1CE4E5B9 - 2**64
MIX2 = 0x94D049BB133111EB - 2**64


def _shift(z: Tensor, bits: int) -> Tensor:
    # >> keeps the sign of an int64; SplitMix64 shifts zeros in.
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def mix(z: Tensor) -> Tensor:
    """Return SplitMix64's output for the state z: 64 well-mixed bits."""
    z = (z ^ _shift(z, 30)) * MIX1
    z = (z ^ _shift(z, 27)) * MIX2
    return z ^ _shift(z, 31)


def keys_of(seed: Tensor, step: Tensor, count: int) -> Tensor:
    """Return the first keys of a step."""
    # The step is added before the product: the compiler would take arange·γ for an index, and an index does not wrap.
    return mix(seed + (torch.arange(count, device=step.device) + step * (1 << 20)) * GOLDEN)


def key_of_use(key: Tensor, use: int) -> Tensor:
    """Return the key for the use-th time that a step uses a weight; `key` is that of use 0."""
    # As a signed 64-bit integer: Python's do not wrap by themselves.
    return key + ((use * GOLDEN + 2**63) % 2**64 - 2**63)


class Mixer(NamedTuple):
    """Rounds of multiplication and xor-shift; the constants are those of published searches for unbiased mixers."""

    shifts: tuple[int, ...]
    factors: tuple[int, ...]


COLUMN = Mixer((17, 11, 15, 14), (0xED5AD4BB, 0xAC4C1B51, 0x31848BAB))
ROW = Mixer((15, 16), (0x7FEB352D, 0x846CA68B))  # fewer: a kernel computes them beside each eight pairs of numbers
JOINED = Mixer((15,), (0xED5AD4BB, 0xAC4C1B51))
BITS = 23  # of a radius, and of an angle
# r = √(−2 ln u) = √(2 ln 2) · √(−log₂ u): the constant goes into the coefficients. The angle is counted in half turns,
# from −1 to 1. The polynomials (nearly least in the largest error) are within 6e-6 of the sine, 8e-7 of the cosine.
ROOT = math.sqrt(2 * math.log(2))
_SINE = (3.141527899, -5.166401788, 2.542712977, -0.581859409, 0.064026173)
_COSINE = (0.999999222, -4.934745629, 4.058045414, -1.332381203, 0.229664213, -0.020582795)
SINE = tuple(ROOT * c for c in _SINE)
COSINE = tuple(ROOT * c for c in _COSINE)


def signed(word: int) -> int:
    """Return a 32-bit word as the int32 that has its bits: PyTorch's integers are signed."""
    return (word + 2**31) % 2**32 - 2**31


def _xor_shift(z: Tensor, bits: int) -> Tensor:
    # >> keeps the sign of an int32; the mixer shifts zeros in.
    return z ^ ((z >> bits) & ((1 << (32 - bits)) - 1))


def rows(key: Tensor, count: int, first: int = 0) -> Tensor:
    """Return the words (int32) of so many rows."""
    low, high = _words(key)
    # The key is added before the product: the compiler would take the rest for an index, and an index does not wrap.
    z = torch.arange(count, device=key.device, dtype=torch.int32) + (low + signed(first))
    z = _xor_shift(z * signed(ROW.factors[0]), ROW.shifts[0])
    return _xor_shift(z * signed(ROW.factors[1]) + high, ROW.shifts[1])


def columns(key: Tensor, count: int) -> Tensor:
    """Return the words (int32) of the first columns; the key's own come in the other order than in `rows`."""
    low, high = _words(key)
    z = torch.arange(count, device=key.device, dtype=torch.int32) + high
    z = _xor_shift(z, COLUMN.shifts[0]) * signed(COLUMN.factors[0]) + low
    z = _xor_shift(z, COLUMN.shifts[1]) * signed(COLUMN.factors[1])
    z = _xor_shift(z, COLUMN.shifts[2]) * signed(COLUMN.factors[2])
    return _xor_shift(z, COLUMN.shifts[3])


def _words(key: Tensor) -> tuple[Tensor, Tensor]:
    return key.to(torch.int32), (key >> 32).to(torch.int32)


def joined(row: Tensor, column: Tensor) -> Tensor:
    """Return the 32 well-mixed bits (int32) of a row and a column."""
    z = (row ^ column) * signed(JOINED.factors[0])
    return _xor_shift(z, JOINED.shifts[0]) * signed(JOINED.factors[1])


def _polynomial(coefficients: Sequence[float], square: Tensor) -> Tensor:
    value = coefficients[-1] * square + coefficients[-2]
    for c in reversed(coefficients[:-2]):
        value = value * square + c
    return value


def pair(word: Tensor) -> tuple[Tensor, Tensor]:
    """Return two independent normal numbers (float32) for 32 bits."""
    # + ½ keeps the logarithm finite; u < 1 keeps the root's argument positive, however roughly the logarithm is taken.
    u = (word & (2**BITS - 1)).float() * 2.0**-BITS + 0.5 * 2.0**-BITS
    radius = torch.sqrt(-torch.log2(u))
    angle = ((word >> (32 - BITS)) & (2**BITS - 1)).float() * 2.0 ** (1 - BITS) - 1
    square = angle * angle
    return radius * (_polynomial(SINE, square) * angle), radius * _polynomial(COSINE, square)


def normal(key: Tensor, shape: Sequence[int], first_row: int = 0) -> Tensor:
    """Return standard normal numbers (float32) of that shape, a function of key and of the row in the first dimension.

    Row i depends on `first_row + i` and on nothing else in the batch, so a batch may be split over processes. Columns
    are all other dimensions, in their logical order.
    """
    numbers = math.prod(shape[1:])
    word = joined(rows(key, shape[0], first_row)[:, None], columns(key, (numbers + 1) // 2))
    return torch.cat(pair(word), dim=1)[:, :numbers].reshape(tuple(shape))


def normal_planes(key: Tensor, shape: Sequence[int], first_row: int = 0) -> Tensor:
    """Return standard normal numbers for the output of a convolution: each position of each image is a row of channels.

    As `normal` has them for vectors: wherever channels lie in memory, a position's numbers are the same.
    """
    positions = math.prod(shape[2:])
    row = rows(key, shape[0] * positions, first_row * positions).view(shape[0], 1, positions)
    word = joined(row, columns(key, (shape[1] + 1) // 2)[:, None])
    return torch.cat(pair(word), dim=1)[:, : shape[1]].reshape(tuple(shape))
