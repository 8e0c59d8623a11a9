"""Triton's kernel for a step's keys. Imported on a CUDA machine only.

`keys_of` has sixteen small operators before the first layer of every pass, and a GPU waits for the launch of each.
"""

# mypy: ignore-errors
# ruff: noqa: N803
# Triton compiles these functions itself: they are not typed Python, and their compile-time constants are in capitals.

import triton
import triton.language as tl

from undrift.kernels.epsilon import GOLDEN, MIX1, MIX2

_GOLDEN, _MIX1, _MIX2 = (tl.constexpr(c) for c in (GOLDEN, MIX1, MIX2))


@triton.jit
def _xor_shift(z, BITS: tl.constexpr):
    # >> keeps the sign of an int64; SplitMix64 shifts zeros in.
    return z ^ ((z >> BITS) & ((1 << (64 - BITS)) - 1))


@triton.jit
def keys_kernel(seed, step, keys, count, BLOCK: tl.constexpr):
    """Write the first keys of a step; all arithmetic wraps around at 64 bits."""
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    nothing = tl.zeros((BLOCK,), dtype=tl.int64)  # in vectors from the start: numpy's scalars do not wrap quietly
    z = number.to(tl.int64) + (nothing + tl.load(step)) * (1 << 20)
    z = z * _GOLDEN + tl.load(seed)
    z = _xor_shift(z, 30) * _MIX1
    z = _xor_shift(z, 27) * _MIX2
    tl.store(keys + number, _xor_shift(z, 31), mask=number < count)
