"""Triton's kernels for a whole layer of one group (`layer`), with the box filter fused into the kernel that uses it.

A position of the plane is a row and a column of an image. The window of output (i, j) begins at input
(i·SH − PH, j·SW − PW) and has KH × KW inputs; inputs outside the image have no energy. Tensors, sums and their
order are as in `kernels_halves`.
"""

# mypy: ignore-errors
# ruff: noqa: N803
# Triton compiles these functions itself: they are not typed Python, and their compile-time constants are in capitals.

import triton
import triton.language as tl

from undrift.kernels.triton.kernels_epsilon import column_words, pair, row_words, sigmas, words
from undrift.kernels.triton.kernels_halves import add_parts, forward, start_at, start_of, two_tiles


@triton.jit
def _under_windows(
    energy_ptr, image, p, there, across, rows, columns,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
):  # fmt: skip
    """Return the energy under the windows of an image's output positions p, of which it has `across` in a row."""
    top, left = (p // across) * SH - PH, (p % across) * SW - PW
    corner = energy_ptr + (image * rows + top) * columns + left
    total = tl.zeros(p.shape, tl.float32)
    for i in tl.static_range(KH):
        down = there
        if PH > 0:
            down = there & (top + i >= 0) & (top + i < rows)
        for j in tl.static_range(KW):
            inside = down
            if PW > 0:
                inside = down & (left + j >= 0) & (left + j < columns)
            total += tl.load(corner + i * columns + j, mask=inside, other=0.0)
    return total


@triton.jit
def add_noise_windowed_kernel(
    y_ptr, energy_ptr, log_var_ptr, key_ptr, out_ptr, plane_ptr, first, positions, per_image, half,
    across, rows, columns,
    LAST: tl.constexpr, WIDE: tl.constexpr, BP: tl.constexpr, WIDTH: tl.constexpr, PLANE: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
):  # fmt: skip
    """Write y + σ·√plane·ε, and the plane: Σ energy under each output's window; out has y's strides."""
    # The plane for the backward pass, apart from the noise's: there its values lie with the threads that draw ε, and to
    # have them where they are stored the compiler adds up each window a second time.
    programs, number = tl.num_programs(0) * tl.num_programs(1), tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    for block in range(number, tl.cdiv(positions, PLANE), programs):
        q = block * PLANE + tl.arange(0, PLANE)
        image, p = q // per_image, q % per_image
        plane = _under_windows(energy_ptr, image, p, q < positions, across, rows, columns, KH, KW, SH, SW, PH, PW)
        tl.store(plane_ptr + q, plane, mask=q < positions)
    low, high = words(key_ptr)
    c = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    step = 1 if LAST else per_image
    sigma0, sigma1 = sigmas(log_var_ptr, c, half)
    of_channel = column_words(c, low, high)
    q = tl.program_id(0) * BP + tl.arange(0, BP)
    image, p = q // per_image, q % per_image
    for block in range(tl.program_id(0), tl.cdiv(positions, BP), tl.num_programs(0)):
        q = block * BP + tl.arange(0, BP)
        there = q < positions
        mask = there[:, None] & (c < half)[None, :]
        offset = start_at(q, image, p, per_image, 2 * half, LAST, WIDE)[:, None] + (c * step)[None, :]
        y0, y1 = two_tiles(y_ptr, offset, half * step, mask)
        plane = _under_windows(energy_ptr, image, p, there, across, rows, columns, KH, KW, SH, SW, PH, PW)
        image, p = forward(image, p, tl.num_programs(0) * BP, per_image)
        e0, e1 = pair(row_words(first + q, low, high)[:, None] ^ of_channel[None, :], plane[:, None])
        tl.store(out_ptr + offset, y0.to(tl.float32) + sigma0[None, :] * e0, mask=mask)
        tl.store(out_ptr + offset + half * step, y1.to(tl.float32) + sigma1[None, :] * e1, mask=mask)


@triton.jit
def add_noise_vectors_kernel(
    x_ptr, y_ptr, log_var_ptr, key_ptr, out_ptr, plane_ptr, extra, first, positions, per_image, half, channels,
    WIDE: tl.constexpr, BP: tl.constexpr, WIDTH: tl.constexpr, INPUTS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Write y + σ·√plane·ε, and the plane: Σx² + extra of the same position. Channels are neighbours in memory.

    A program has BLOCKS blocks of positions: it sums over their inputs, and then goes through their outputs, some
    channels of all blocks at a time, so that σ is computed once for them.
    """
    start = tl.program_id(0) * (BP * BLOCKS)
    for block in tl.static_range(BLOCKS):
        q = start + block * BP + tl.arange(0, BP)
        base = start_of(q, per_image, channels, True, WIDE)
        total = tl.zeros((BP, INPUTS), tl.float32)
        for of_tile in range(0, channels, INPUTS):
            c = of_tile + tl.arange(0, INPUTS)
            mask = (q < positions)[:, None] & (c < channels)[None, :]
            x = tl.load(x_ptr + base[:, None] + c[None, :], mask=mask, other=0.0).to(tl.float32)
            total += x * x
        tl.store(plane_ptr + q, tl.sum(total, axis=1) + extra, mask=q < positions)
    tl.debug_barrier()  # from here on each thread reads what others of its program have written
    low, high = words(key_ptr)
    for of_tile in range(0, half, WIDTH):
        c = of_tile + tl.arange(0, WIDTH)
        sigma0, sigma1 = sigmas(log_var_ptr, c, half)
        of_channel = column_words(c, low, high)
        for block in tl.static_range(BLOCKS):
            q = start + block * BP + tl.arange(0, BP)
            mask = (q < positions)[:, None] & (c < half)[None, :]
            offset = start_of(q, per_image, 2 * half, True, WIDE)[:, None] + c[None, :]
            y0, y1 = two_tiles(y_ptr, offset, half, mask)
            plane = tl.load(plane_ptr + q, mask=q < positions, other=0.0)[:, None]
            e0, e1 = pair(row_words(first + q, low, high)[:, None] ^ of_channel[None, :], plane)
            tl.store(out_ptr + offset, y0.to(tl.float32) + sigma0[None, :] * e0, mask=mask)
            tl.store(out_ptr + offset + half, y1.to(tl.float32) + sigma1[None, :] * e1, mask=mask)


@triton.jit
def _pull(
    scratch_ptr, q, there, per_image, columns, outputs, out_rows, across, blocks, BLOCKS: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
):  # fmt: skip
    """Return the gradient of the energy at input positions q: its sum over the outputs whose windows hold them.

    In steps of a stride from the last such output backwards; all blocks of channels side by side.
    """
    b = tl.arange(0, BLOCKS)[None, :]
    of_block = scratch_ptr + b.to(tl.int64) * outputs
    known = there[:, None] & (b < blocks)
    if KH * KW * SH * SW == 1:  # each window is one input
        total = tl.load(of_block + q[:, None], mask=known, other=0.0)
    else:
        image, p = q // per_image, q % per_image
        down, right = p // columns + PH, p % columns + PW
        total = tl.zeros((q.shape[0], BLOCKS), tl.float32)
        for i in tl.static_range((KH + SH - 1) // SH):
            row = down // SH - i
            in_row = (row >= 0) & (row < out_rows) & (down % SH + i * SH < KH)
            for j in tl.static_range((KW + SW - 1) // SW):
                column = right // SW - j
                holds = in_row & (column >= 0) & (column < across) & (right % SW + j * SW < KW)
                at = ((image * out_rows + row) * across + column)[:, None]
                total += tl.load(of_block + at, mask=known & holds[:, None], other=0.0)
    return tl.sum(total, axis=1)


@triton.jit
def finish_log_var_kernel(
    scratch_ptr, grad_log_var_ptr, outputs, out_channels, blocks, parts, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Write log_var's gradient from what `noise_gradients_kernel` left."""
    add_parts(scratch_ptr, grad_log_var_ptr, tl.program_id(0), outputs, out_channels, blocks, parts, ROWS, COLUMNS)


@triton.jit
def finish_layer_kernel(
    x_ptr, scratch_ptr, more_ptr, grad_x_ptr, grad_log_var_ptr, outputs, out_channels, blocks, parts, first,
    positions, per_image, channels, columns, out_rows, across,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr, SPLIT: tl.constexpr,
    LAST: tl.constexpr, WIDE: tl.constexpr, BP: tl.constexpr, WIDTH: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    ADDED: tl.constexpr,
):  # fmt: skip
    """Write log_var's gradient (the first programs) and that of x by its energy: 2·x·pull, ADDED to `more`.

    SPLIT programs share a block of positions. x, more and grad_x have the same strides.
    """
    number = tl.program_id(0) - first
    if number < 0:
        add_parts(scratch_ptr, grad_log_var_ptr, number + first, outputs, out_channels, blocks, parts, ROWS, COLUMNS)
    else:
        q = (number // SPLIT) * BP + tl.arange(0, BP)
        there = q < positions
        start = start_of(q, per_image, channels, LAST, WIDE)[:, None]
        step = 1 if LAST else per_image
        # x is asked for before what it is multiplied with.
        c = (number % SPLIT) * WIDTH + tl.arange(0, WIDTH)
        ahead = tl.load(x_ptr + start + (c * step)[None, :], mask=there[:, None] & (c < channels)[None, :], other=0.0)
        pull = _pull(
            scratch_ptr, q, there, per_image, columns, outputs, out_rows, across, blocks, BLOCKS, KH, KW, SH, SW, PH, PW
        )
        twice = 2.0 * pull[:, None]
        for of_tile in range((number % SPLIT) * WIDTH, channels, SPLIT * WIDTH):
            x = ahead.to(tl.float32)
            c = of_tile + SPLIT * WIDTH + tl.arange(0, WIDTH)
            mask = there[:, None] & (c < channels)[None, :]
            ahead = tl.load(x_ptr + start + (c * step)[None, :], mask=mask, other=0.0)
            c = of_tile + tl.arange(0, WIDTH)
            mask = there[:, None] & (c < channels)[None, :]
            gradient = x * twice
            if ADDED:
                gradient += tl.load(more_ptr + start + (c * step)[None, :], mask=mask, other=0.0).to(tl.float32)
            tl.store(grad_x_ptr + start + (c * step)[None, :], gradient, mask=mask)
