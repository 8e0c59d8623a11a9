"""Triton's kernels for layers of one group, whose channels come in two halves. Imported on a CUDA machine only.

A tensor is seen as positions × channels: position q = image · per_image + p is one output of the energy plane and a row
of ε. The first half of the channels has the sines, so a program reads a tile of the first half and the same tile of the
second, and one word makes two values. LAST says that channels are neighbours in memory (channels-last, linear layers);
else positions are. WIDE makes offsets 64-bit.

Every sum is made in one fixed order, without atomics: the same key and gradient give the same bits.
"""

# mypy: ignore-errors
# ruff: noqa: N803
# Triton compiles these functions itself: they are not typed Python, and their compile-time constants are in capitals.

import triton
import triton.language as tl

from undrift.kernels.triton.kernels_epsilon import column_words, pair, polar, row_words, sigmas, words

LEAST = 1.2e-38  # about the least normal number: below it 1 / plane is infinite
_LEAST = tl.constexpr(LEAST)


@triton.jit
def two_tiles(y_ptr, offset, apart, mask):
    """Return a tile of the first half of the channels, and the same tile of the second, so far apart in memory."""
    first = tl.load(y_ptr + offset, mask=mask, other=0.0)
    return first, tl.load(y_ptr + offset + apart, mask=mask, other=0.0)


@triton.jit
def start_of(q, per_image, channels, LAST: tl.constexpr, WIDE: tl.constexpr):
    """Return where a position's first channel is in memory."""
    return start_at(q, q // per_image, q % per_image, per_image, channels, LAST, WIDE)


@triton.jit
def start_at(q, image, p, per_image, channels, LAST: tl.constexpr, WIDE: tl.constexpr):
    """Return where the first channel of an image's position p is in memory, the q-th of all."""
    if LAST:
        return q.to(tl.int64) * channels if WIDE else q * channels
    return image.to(tl.int64) * channels * per_image + p if WIDE else image * channels * per_image + p


@triton.jit
def forward(image, p, ahead, per_image):
    """Return image and position after so many positions more.

    A division takes twenty instructions, as much as a value of ε; how far to go is the same for all, and divided once.
    """
    p += ahead % per_image
    over = p >= per_image
    return image + ahead // per_image + over, tl.where(over, p - per_image, p)


@triton.jit
def square_sum_kernel(
    x_ptr, out_ptr, extra, positions, per_image, channels,
    LAST: tl.constexpr, WIDE: tl.constexpr, BP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Sum x² over the channels, and add `extra`."""
    q = tl.program_id(0) * BP + tl.arange(0, BP)
    base = start_of(q, per_image, channels, LAST, WIDE)
    step = 1 if LAST else per_image
    total = tl.zeros((BP, WIDTH), tl.float32)
    for start in range(0, channels, WIDTH):
        c = start + tl.arange(0, WIDTH)
        mask = (q < positions)[:, None] & (c < channels)[None, :]
        x = tl.load(x_ptr + base[:, None] + (c * step)[None, :], mask=mask, other=0.0).to(tl.float32)
        total += x * x
    tl.store(out_ptr + q, tl.sum(total, axis=1) + extra, mask=q < positions)


@triton.jit
def square_sum_gradient_kernel(
    x_ptr, grad_ptr, out_ptr, positions, per_image, channels,
    LAST: tl.constexpr, WIDE: tl.constexpr, BP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write 2·x·grad; out has x's strides."""
    q = tl.program_id(0) * BP + tl.arange(0, BP)
    base = start_of(q, per_image, channels, LAST, WIDE)
    step = 1 if LAST else per_image
    twice = 2.0 * tl.load(grad_ptr + q, mask=q < positions, other=0.0)
    for start in range(tl.program_id(1) * WIDTH, channels, tl.num_programs(1) * WIDTH):
        c = start + tl.arange(0, WIDTH)
        mask = (q < positions)[:, None] & (c < channels)[None, :]
        offset = base[:, None] + (c * step)[None, :]
        x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + offset, x * twice[:, None], mask=mask)


@triton.jit
def place_of(q, image, p, c, positions, per_image, half, LAST: tl.constexpr, WIDE: tl.constexpr):
    """Return where the tile of some positions and channels of the first half lies, and what of it there is.

    No pointer goes in: PyTorch's compiler takes every pointer that a function is given for written where its result is.
    """
    offset = start_at(q, image, p, per_image, 2 * half, LAST, WIDE) + (c * (1 if LAST else per_image))[None, :]
    return offset, (q < positions) & (c < half)[None, :]


@triton.jit
def plane_at(plane_ptr, q, positions, RUNS: tl.constexpr):
    """Return the plane of positions, of which it has RUNS parts side by side."""
    plane = tl.load(plane_ptr + q * RUNS, mask=q < positions, other=0.0)
    for run in tl.static_range(1, RUNS):
        plane += tl.load(plane_ptr + q * RUNS + run, mask=q < positions, other=0.0)
    return plane


@triton.jit
def add_noise_kernel(
    y_ptr, plane_ptr, log_var_ptr, key_ptr, out_ptr, first, positions, per_image, half,
    LAST: tl.constexpr, WIDE: tl.constexpr, BP: tl.constexpr, WIDTH: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    """Write y + σ·√plane·ε; out has y's strides."""
    _add_noise(
        y_ptr, plane_ptr, log_var_ptr, key_ptr, out_ptr, first, positions, per_image, half, LAST, WIDE, BP, WIDTH, RUNS
    )


@triton.jit
def add_noise_in_place_kernel(
    y_ptr, plane_ptr, log_var_ptr, key_ptr, first, positions, per_image, half,
    LAST: tl.constexpr, WIDE: tl.constexpr, BP: tl.constexpr, WIDTH: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    """Add σ·√plane·ε to y."""
    _add_noise(
        y_ptr, plane_ptr, log_var_ptr, key_ptr, y_ptr, first, positions, per_image, half, LAST, WIDE, BP, WIDTH, RUNS
    )


@triton.jit
def _add_noise(
    y_ptr, plane_ptr, log_var_ptr, key_ptr, out_ptr, first, positions, per_image, half,
    LAST: tl.constexpr, WIDE: tl.constexpr, BP: tl.constexpr, WIDTH: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    low, high = words(key_ptr)
    c = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    apart = half if LAST else half * per_image
    sigma0, sigma1 = sigmas(log_var_ptr, c, half)
    of_channel = column_words(c, low, high)
    # A block's numbers are asked for while ε of the block before is computed, and so below.
    q = (tl.program_id(0) * BP + tl.arange(0, BP))[:, None]
    image, p = q // per_image, q % per_image
    offset, mask = place_of(q, image, p, c, positions, per_image, half, LAST, WIDE)
    next0, next1 = two_tiles(y_ptr, offset, apart, mask)
    next_plane = plane_at(plane_ptr, q, positions, RUNS)
    for block in range(tl.program_id(0), tl.cdiv(positions, BP), tl.num_programs(0)):
        y0, y1, plane, here, there = next0.to(tl.float32), next1.to(tl.float32), next_plane, offset, mask
        if not LAST:
            image, p = forward(image, p, tl.num_programs(0) * BP, per_image)
        q = ((block + tl.num_programs(0)) * BP + tl.arange(0, BP))[:, None]
        offset, mask = place_of(q, image, p, c, positions, per_image, half, LAST, WIDE)
        next0, next1 = two_tiles(y_ptr, offset, apart, mask)
        next_plane = plane_at(plane_ptr, q, positions, RUNS)
        q = (block * BP + tl.arange(0, BP))[:, None]
        e0, e1 = pair(row_words(first + q, low, high) ^ of_channel[None, :], plane)
        tl.store(out_ptr + here, y0 + sigma0[None, :] * e0, mask=there)
        tl.store(out_ptr + here + apart, y1 + sigma1[None, :] * e1, mask=there)


@triton.jit
def slope(plane):
    """Return 1 / (2 plane): √plane·ε stands where ε / √plane should, and is 0 where plane is, whatever divides it."""
    return 0.5 / tl.maximum(plane, _LEAST)


@triton.jit
def noise_gradients_kernel(
    grad_ptr, plane_ptr, log_var_ptr, key_ptr, scratch_ptr, first, positions, per_image, half,
    LAST: tl.constexpr, WIDE: tl.constexpr, BP: tl.constexpr, WIDTH: tl.constexpr, RUNS: tl.constexpr,
    SLOPED: tl.constexpr,
):  # fmt: skip
    """Write `sum_noise`'s pulls, and behind them its parts."""
    parts_ptr = scratch_ptr + tl.cast(tl.num_programs(1), tl.int64) * positions
    sum_noise(
        grad_ptr, plane_ptr, log_var_ptr, key_ptr, scratch_ptr, parts_ptr, first, positions, per_image, half,
        LAST, WIDE, BP, WIDTH, RUNS, SLOPED, 1,
    )  # fmt: skip


@triton.jit
def sum_noise(
    grad_ptr, plane_ptr, log_var_ptr, key_ptr, pulls_ptr, parts_ptr, first, positions, per_image, half,
    LAST: tl.constexpr, WIDE: tl.constexpr, BP: tl.constexpr, WIDTH: tl.constexpr, RUNS: tl.constexpr,
    SLOPED: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Write Σ grad·σ·√plane·ε over this program's channels, for each of its positions, and half of that over those.

    pulls has a row of positions, every APART numbers, for each of `num_programs(1)` blocks of channels (SLOPED: of the
    plane's gradient), parts a row of channels for each of `num_programs(0)` parts of the positions.
    """
    low, high = words(key_ptr)
    c = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    apart = half if LAST else half * per_image
    sigma0, sigma1 = sigmas(log_var_ptr, c, half)
    of_channel = column_words(c, low, high)
    total0 = tl.zeros((BP, WIDTH), tl.float32)
    total1 = tl.zeros((BP, WIDTH), tl.float32)
    row = pulls_ptr + tl.cast(tl.program_id(1), tl.int64) * (positions * APART)
    q = (tl.program_id(0) * BP + tl.arange(0, BP))[:, None]
    image, p = q // per_image, q % per_image
    offset, mask = place_of(q, image, p, c, positions, per_image, half, LAST, WIDE)
    next0, next1 = two_tiles(grad_ptr, offset, apart, mask)
    next_plane = plane_at(plane_ptr, q, positions, RUNS)
    for block in range(tl.program_id(0), tl.cdiv(positions, BP), tl.num_programs(0)):
        grad0, grad1, plane = next0.to(tl.float32), next1.to(tl.float32), next_plane
        if not LAST:
            image, p = forward(image, p, tl.num_programs(0) * BP, per_image)
        q = ((block + tl.num_programs(0)) * BP + tl.arange(0, BP))[:, None]
        offset, mask = place_of(q, image, p, c, positions, per_image, half, LAST, WIDE)
        next0, next1 = two_tiles(grad_ptr, offset, apart, mask)
        next_plane = plane_at(plane_ptr, q, positions, RUNS)
        q = (block * BP + tl.arange(0, BP))[:, None]
        radius, sine, cosine = polar(row_words(first + q, low, high) ^ of_channel[None, :], plane)
        # The radius last, in three multiply-adds: √plane·ε itself would be two products first.
        pull0, pull1 = grad0 * sine, grad1 * cosine
        total0 += radius * pull0
        total1 += radius * pull1
        by_position = tl.sum(radius * (pull0 * sigma0[None, :] + pull1 * sigma1[None, :]), axis=1, keep_dims=True)
        if SLOPED:
            by_position *= slope(plane)
        tl.store(row + q.to(tl.int64) * APART, by_position, mask=q < positions)
    row = parts_ptr + tl.program_id(0) * (2 * half)
    tl.store(row + c, 0.5 * sigma0 * tl.sum(total0, axis=0), mask=c < half)
    tl.store(row + half + c, 0.5 * sigma1 * tl.sum(total1, axis=0), mask=c < half)


@triton.jit
def add_parts(
    scratch_ptr, grad_log_var_ptr, number, outputs, channels, blocks, parts, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Write the number-th part of log_var's gradient: the sum of the rows behind the blocks'."""
    c = number * COLUMNS + tl.arange(0, COLUMNS)
    first = scratch_ptr + tl.cast(blocks, tl.int64) * outputs
    tl.store(grad_log_var_ptr + c, sum_rows(first, c, channels, parts, ROWS, COLUMNS), mask=c < channels)


@triton.jit
def sum_rows(first, c, channels, parts, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the sum of some columns of so many rows of channels."""
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, parts, ROWS):
        r = start + tl.arange(0, ROWS)
        mask = (r < parts)[:, None] & (c < channels)[None, :]
        sums += tl.load(first + (r * channels)[:, None] + c[None, :], mask=mask, other=0.0)
    return tl.sum(sums, axis=0)


@triton.jit
def finish_kernel(
    scratch_ptr, plane_ptr, grad_plane_ptr, grad_log_var_ptr, positions, channels, blocks, parts,
    PLANE: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, APART: tl.constexpr,
    RUNS: tl.constexpr,
):  # fmt: skip
    """Add up the rows of `noise_gradients_kernel`: the gradients of plane (first programs) and log_var (the others)."""
    planes = tl.cdiv(positions, PLANE)
    if tl.program_id(0) < planes:
        add_pulls(scratch_ptr, plane_ptr, grad_plane_ptr, positions, blocks, PLANE, BLOCKS, RUNS, APART)
    else:
        number = tl.program_id(0) - planes
        add_parts(scratch_ptr, grad_log_var_ptr, number, positions, channels, blocks, parts, ROWS, WIDTH)


@triton.jit
def add_pulls(
    pulls_ptr, plane_ptr, grad_plane_ptr, positions, blocks,
    PLANE: tl.constexpr, BLOCKS: tl.constexpr, RUNS: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Write this program's part of the plane's gradient, every APART numbers: the sum of all blocks' rows."""
    q = tl.program_id(0) * PLANE + tl.arange(0, PLANE)
    plane = plane_at(plane_ptr, q, positions, RUNS)
    total = tl.zeros((BLOCKS, PLANE), tl.float32)
    for start in range(0, blocks, BLOCKS):  # side by side: one after the other, each would wait for memory
        b = (start + tl.arange(0, BLOCKS))[:, None]
        known = (b < blocks) & (q < positions)[None, :]
        total += tl.load(pulls_ptr + b.to(tl.int64) * positions + q[None, :], mask=known, other=0.0)
    sums = tl.sum(total, axis=0) * slope(plane)
    tl.store(grad_plane_ptr + q.to(tl.int64) * APART, sums, mask=q < positions)


@triton.jit
def apart_kernel(values_ptr, out_ptr, count, BLOCK: tl.constexpr, APART: tl.constexpr):
    """Write values every APART numbers."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i.to(tl.int64) * APART, tl.load(values_ptr + i, mask=i < count, other=0.0), mask=i < count)
