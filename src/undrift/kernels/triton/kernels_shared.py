"""Triton's kernels for a graph in which all layers' log-variances have one gradient (`shared`).

A layer's own kernels write partial sums, and one kernel adds up those of many layers, with the KL's gradient. Tensors,
sums and their order are as in `kernels_halves`.
"""

# mypy: ignore-errors
# ruff: noqa: N803
# Triton compiles these functions itself: they are not typed Python, and their compile-time constants are in capitals.

import triton
import triton.language as tl

from undrift.kernels.triton.kernels_halves import add_pulls, sum_noise, sum_rows


@triton.jit
def noise_parts_kernel(
    grad_ptr, plane_ptr, log_var_ptr, key_ptr, pulls_ptr, parts_ptr, first, positions, per_image, half,
    LAST: tl.constexpr, WIDE: tl.constexpr, BP: tl.constexpr, WIDTH: tl.constexpr, RUNS: tl.constexpr,
    SLOPED: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Write `sum_noise`'s pulls and parts, each where it belongs."""
    sum_noise(
        grad_ptr, plane_ptr, log_var_ptr, key_ptr, pulls_ptr, parts_ptr, first, positions, per_image, half,
        LAST, WIDE, BP, WIDTH, RUNS, SLOPED, APART,
    )  # fmt: skip


@triton.jit
def add_pulls_kernel(
    pulls_ptr, plane_ptr, grad_plane_ptr, positions, blocks,
    PLANE: tl.constexpr, BLOCKS: tl.constexpr, RUNS: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Write the plane's gradient: the sum of what `noise_parts_kernel` has left for all blocks of channels."""
    add_pulls(pulls_ptr, plane_ptr, grad_plane_ptr, positions, blocks, PLANE, BLOCKS, RUNS, APART)


@triton.jit
def add_layers_kernel(
    p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, p12, p13, p14, p15, more_ptr, out_ptr,
    s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15, channels, parts,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the gradients of sixteen layers alike, each at its start in out: Σ parts, and what `more` has there."""
    layer = tl.program_id(1)
    parts_ptr, start = p0, s0
    if layer == 1:
        parts_ptr, start = p1, s1
    elif layer == 2:
        parts_ptr, start = p2, s2
    elif layer == 3:
        parts_ptr, start = p3, s3
    elif layer == 4:
        parts_ptr, start = p4, s4
    elif layer == 5:
        parts_ptr, start = p5, s5
    elif layer == 6:
        parts_ptr, start = p6, s6
    elif layer == 7:
        parts_ptr, start = p7, s7
    elif layer == 8:
        parts_ptr, start = p8, s8
    elif layer == 9:
        parts_ptr, start = p9, s9
    elif layer == 10:
        parts_ptr, start = p10, s10
    elif layer == 11:
        parts_ptr, start = p11, s11
    elif layer == 12:
        parts_ptr, start = p12, s12
    elif layer == 13:
        parts_ptr, start = p13, s13
    elif layer == 14:
        parts_ptr, start = p14, s14
    elif layer == 15:
        parts_ptr, start = p15, s15
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = sum_rows(parts_ptr, c, channels, parts, ROWS, COLUMNS)
    total += tl.load(more_ptr + start + c, mask=c < channels, other=0.0).to(tl.float32)
    tl.store(out_ptr + start + c, total, mask=c < channels)
