"""Triton's kernels for the box filter over an energy plane, and its transpose. Imported on a CUDA machine only.

For compiled graphs: given pooling instead, the compiler writes the window's sum into every kernel that reads it, where
it is done again for each channel.
"""

# mypy: ignore-errors
# ruff: noqa: N803
# Triton compiles these functions itself: they are not typed Python, and their compile-time constants are in capitals.

import triton
import triton.language as tl


@triton.jit
def box_kernel(
    plane_ptr, out_ptr, numbers, height, width, out_height, out_width, down, across, top, left,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the plane under each output's window: strides `down` and `across`, padding `top` and `left`."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    image, place = i // (out_height * out_width), i % (out_height * out_width)
    first_row, first_column = place // out_width * down - top, place % out_width * across - left
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(ROWS * COLUMNS):
        row, column = first_row + k // COLUMNS, first_column + k % COLUMNS
        inside = (i < numbers) & (row >= 0) & (row < height) & (column >= 0) & (column < width)
        total += tl.load(plane_ptr + (image * height + row) * width + column, mask=inside, other=0.0)
    tl.store(out_ptr + i, total, mask=i < numbers)


@triton.jit
def box_gradient_kernel(
    grad_ptr, out_ptr, numbers, height, width, out_height, out_width, down, across, top, left,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of all windows that a place of the plane lies in; `numbers` are the plane's."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    image, place = i // (height * width), i % (height * width)
    last_row, last_column = place // width + top, place % width + left
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(ROWS * COLUMNS):
        row, column = last_row - k // COLUMNS, last_column - k % COLUMNS
        inside = (i < numbers) & (row >= 0) & (column >= 0) & (row % down == 0) & (column % across == 0)
        row, column = row // down, column // across
        inside = inside & (row < out_height) & (column < out_width)
        total += tl.load(grad_ptr + (image * out_height + row) * out_width + column, mask=inside, other=0.0)
    tl.store(out_ptr + i, total, mask=i < numbers)
