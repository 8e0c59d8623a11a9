"""A kernel that Triton compiled, taken apart: its handle, its threads, and its arguments as the driver wants them."""

import struct
from collections.abc import Sequence
from re import findall
from typing import Any

_SCRATCH = 2  # pointers to memory that a kernel may have asked for, behind its arguments, at most


def packed(
    compiled: Any, grid: Sequence[int], tensors: int, numbers: Sequence[Any], device: int
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return a kernel's handle, grid, threads, shared memory and device; and its arguments behind the tensors.

    None where it wants something else than we know of: what it takes is read off its own machine code.

    Args:
        compiled: what Triton's own launch returned.
        grid: programs along two axes.
        tensors: how many come first.
        numbers: the arguments behind them, of which the compiler has left out those that are 1.
        device: index of the GPU.
    """
    about = compiled.metadata
    unusual = ("launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size")
    if about.num_ctas != 1 or any(getattr(about, name, None) for name in unusual):
        return None
    kept = [number for number in numbers if isinstance(number, float) or number != 1]
    head = compiled.asm["ptx"].partition(".entry")[2].partition(")")[0]
    bits = [int(each) for each in findall(r"\.param\s+\.[a-z](\d+)", head)]
    more = len(bits) - tensors - len(kept)
    if not 0 <= more <= _SCRATCH or bits != [64] * tensors + [_bits(number) for number in kept] + [64] * more:
        return None
    handle = (int(compiled.function), *grid, 32 * about.num_warps, about.shared, device)
    return handle, (*map(_word, kept), *[0] * more)


def _bits(number: Any) -> int:
    return 32 if isinstance(number, float) or -(2**31) <= number < 2**31 else 64


def _word(number: Any) -> int:
    """Return the number's bits as an integer; Triton takes Python's for float32."""
    return struct.unpack("<I", struct.pack("<f", number))[0] if isinstance(number, float) else number
