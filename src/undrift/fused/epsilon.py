"""ε: standard normal numbers that are a function of a 64-bit key and a position.

A 32-bit counter goes through three rounds of multiply and xor-shift (the constants are those of a published search for
unbiased 32-bit mixers), one word of the key before the first round and the other inside it. Box-Muller turns the word
into two normal numbers: its upper bits give a radius, its lower an angle. The first half of a row of numbers has the
sines, the second half the cosines of the same words, so that both halves can be read and written as they lie in memory.

Every implementation and every kind of device computes this one function; only the last bits differ, as one logarithm
or square root does from another. No number exceeds 5.27, which one normal number in seven million does.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

SHIFTS = (17, 11, 15, 14)
FACTORS = (0xED5AD4BB, 0xAC4C1B51, 0x31848BAB)
ANGLE_BITS = 12
# r = √(−2 ln u) = √(2 ln 2) · √(−log₂ u): the constant goes into the coefficients. The angle is uniform on (−π/2, π/2),
# where the sine already has the law it has on the whole circle, and the cosine needs a sign; it is counted in steps of
# π/2^ANGLE_BITS. The polynomials (least squares at Chebyshev points) are within 6e-7 of the sine, 7e-6 of the cosine.
HALF = (2**ANGLE_BITS - 1) / 2
ROOT = math.sqrt(2 * math.log(2))
_SINE = (3.141581975, -5.167141302, 2.541887067, -0.554608852)
_COSINE = (0.999993249, -4.933934668, 4.041248102, -1.222031763)
SINE = tuple(ROOT * c * 2.0 ** (-ANGLE_BITS * (2 * k + 1)) for k, c in enumerate(_SINE))
COSINE = tuple(ROOT * c * 2.0 ** (-ANGLE_BITS * 2 * k) for k, c in enumerate(_COSINE))


def signed(word: int) -> int:
    """Return a 32-bit word as the int32 that has its bits: PyTorch's integers are signed."""
    return (word + 2**31) % 2**32 - 2**31


def _xor_shift(z: Tensor, bits: int) -> Tensor:
    # >> keeps the sign of an int32; the mixer shifts zeros in.
    return z ^ ((z >> bits) & ((1 << (32 - bits)) - 1))


def bits(key: Tensor, rows: int, numbers: int, first_row: int = 0) -> Tensor:
    """Return 32 well-mixed bits (int32) for each row and each of its numbers."""
    low, high = key.to(torch.int32), (key >> 32).to(torch.int32)
    row = torch.arange(rows, device=key.device, dtype=torch.int32)[:, None]
    column = torch.arange(numbers, device=key.device, dtype=torch.int32)
    # (first_row + row) · numbers + column + low. The key is added before the product: the compiler would take the rest
    # for an index, and an index does not wrap around.
    start = low + signed(first_row * numbers) - low * signed(numbers)
    z = (row + low) * signed(numbers) + (column + start)
    z = _xor_shift(z, SHIFTS[0]) * signed(FACTORS[0]) + high
    z = _xor_shift(z, SHIFTS[1]) * signed(FACTORS[1])
    z = _xor_shift(z, SHIFTS[2]) * signed(FACTORS[2])
    return _xor_shift(z, SHIFTS[3])


def _radius(word: Tensor) -> Tensor:
    # + ½ keeps the logarithm finite; u < 1 keeps the root's argument positive, however roughly the logarithm is taken.
    left = 31 - ANGLE_BITS
    u = ((word >> (32 - left)) & (2**left - 1)).float() * 2.0**-left + 0.5 * 2.0**-left
    return torch.sqrt(-torch.log2(u))


def _polynomial(coefficients: Sequence[float], square: Tensor) -> Tensor:
    value = coefficients[-1] * square + coefficients[-2]
    for c in reversed(coefficients[:-2]):
        value = value * square + c
    return value


def pair(word: Tensor) -> tuple[Tensor, Tensor]:
    """Return two independent normal numbers (float32) for 32 bits: 19 for the radius, a sign, 12 for the angle."""
    angle = (word & (2**ANGLE_BITS - 1)).float() - HALF
    radius, square = _radius(word), angle * angle
    sign = 1 - 2 * ((word >> ANGLE_BITS) & 1)
    return radius * (_polynomial(SINE, square) * angle), sign * radius * _polynomial(COSINE, square)


def normal(key: Tensor, shape: Sequence[int], first_row: int = 0) -> Tensor:
    """Return standard normal numbers (float32) of that shape, a function of key and of the row in the first dimension.

    Row i depends on `first_row + i` and on nothing else in the batch, so a batch may be split over processes. Positions
    are counted in the tensor's logical order: channels-last memory holds the same numbers.
    """
    numbers = math.prod(shape[1:])
    both = torch.cat(pair(bits(key, shape[0], (numbers + 1) // 2, first_row)), dim=1)
    return both[:, :numbers].reshape(tuple(shape))
