"""Triton's kernels for any number of groups and channels.

They are slower than `kernels_halves`: two values of ε are drawn for each that is used. A tensor is seen as positions ×
channels, wherever its memory has them: position q = image · per_image + p, and the strides of image, channel and p are
arguments. A program works on BP positions and on TOGETHER groups of channels at
once, WIDTH channels of each at a time; narrow groups (depthwise convolutions) share a program, wide ones are looped
over. Sums over positions are one row of partial sums per program, added up afterwards. No atomics: the same key and
gradient give the same bits.
"""

# mypy: ignore-errors
# ruff: noqa: N803
# Triton compiles these functions itself: they are not typed Python, and their compile-time constants are in capitals.

import triton
import triton.language as tl

from undrift.kernels.triton.kernels_epsilon import column_words, pair, row_words, sigma, words


@triton.jit
def _epsilon(q, channel, first, channels, low, high):
    """Return ε for each position (rows) and channel (columns)."""
    half = (channels + 1) // 2
    second = channel >= half
    of_channel = column_words(tl.where(second, channel - half, channel), low, high)
    sine, cosine = pair(row_words(first + q, low, high)[:, None] ^ of_channel[None, :], 1.0)
    return tl.where(second[None, :], cosine, sine)


@triton.jit
def _channels(first_group, start, members, groups, TOGETHER: tl.constexpr, WIDTH: tl.constexpr):
    """Return, for each column of a tile, its group, its channel, and whether there is such a channel."""
    column = tl.arange(0, TOGETHER * WIDTH)
    group = first_group + column // WIDTH
    member = start + column % WIDTH
    return group, group * members + member, (group < groups) & (member < members)


@triton.jit
def _block(members, groups, BP: tl.constexpr, TOGETHER: tl.constexpr, WIDTH: tl.constexpr):
    """Return this program's positions, its bundle of groups, and the first of a group's channels it has."""
    wide = tl.cdiv(members, WIDTH)
    blocks = tl.cdiv(groups, TOGETHER) * wide
    block = tl.program_id(0) % blocks
    return (tl.program_id(0) // blocks) * BP + tl.arange(0, BP), block // wide, (block % wide) * WIDTH


@triton.jit
def grouped_square_sum_kernel(
    x_ptr, out_ptr, positions, per_image, members, groups, stride_image, stride_channel, stride_position,
    BP: tl.constexpr, TOGETHER: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Sum x² over each group's channels."""
    blocks = tl.cdiv(groups, TOGETHER)
    q = (tl.program_id(0) // blocks) * BP + tl.arange(0, BP)
    first_group = (tl.program_id(0) % blocks) * TOGETHER
    image, p = q // per_image, q % per_image
    place = image.to(tl.int64) * stride_image + p.to(tl.int64) * stride_position
    total = tl.zeros((BP, TOGETHER), tl.float32)
    for start in range(0, members, WIDTH):
        _, channel, there = _channels(first_group, start, members, groups, TOGETHER, WIDTH)
        mask = (q < positions)[:, None] & there[None, :]
        x = tl.load(x_ptr + place[:, None] + channel[None, :] * stride_channel, mask=mask, other=0.0).to(tl.float32)
        if TOGETHER == 1:
            total += tl.sum(x * x, axis=1)[:, None]
        else:
            total += tl.sum(tl.reshape(x * x, (BP, TOGETHER, WIDTH)), axis=2)
    group = first_group + tl.arange(0, TOGETHER)
    to = (image[:, None] * groups + group[None, :]).to(tl.int64) * per_image + p[:, None]
    tl.store(out_ptr + to, total, mask=(q < positions)[:, None] & (group < groups)[None, :])


@triton.jit
def grouped_square_sum_gradient_kernel(
    x_ptr, grad_ptr, out_ptr, positions, per_image, members, groups, stride_image, stride_channel, stride_position,
    BP: tl.constexpr, TOGETHER: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write 2·x·grad; out has x's strides."""
    q, bundle, start = _block(members, groups, BP, TOGETHER, WIDTH)
    image, p = q // per_image, q % per_image
    place = image.to(tl.int64) * stride_image + p.to(tl.int64) * stride_position
    group, channel, there = _channels(bundle * TOGETHER, start, members, groups, TOGETHER, WIDTH)
    mask = (q < positions)[:, None] & there[None, :]
    offset = place[:, None] + channel[None, :] * stride_channel
    x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    if TOGETHER == 1:
        at = (image * groups + bundle).to(tl.int64) * per_image + p
        grad = tl.load(grad_ptr + at, mask=q < positions, other=0.0)[:, None]
    else:
        at = (image[:, None] * groups + group[None, :]).to(tl.int64) * per_image + p[:, None]
        grad = tl.load(grad_ptr + at, mask=mask, other=0.0)
    tl.store(out_ptr + offset, 2.0 * x * grad, mask=mask)


@triton.jit
def grouped_add_noise_kernel(
    y_ptr, plane_ptr, log_var_ptr, key_ptr, out_ptr, first, positions, per_image, members, groups,
    stride_image, stride_channel, stride_position,
    BP: tl.constexpr, TOGETHER: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write y + σ·√plane·ε; out has y's strides."""
    q, bundle, start = _block(members, groups, BP, TOGETHER, WIDTH)
    image, p = q // per_image, q % per_image
    low, high = words(key_ptr)
    group, channel, there = _channels(bundle * TOGETHER, start, members, groups, TOGETHER, WIDTH)
    mask = (q < positions)[:, None] & there[None, :]
    std = sigma(tl.load(log_var_ptr + channel, mask=there, other=0.0))
    if TOGETHER == 1:
        at = (image * groups + bundle).to(tl.int64) * per_image + p
        root = tl.sqrt(tl.load(plane_ptr + at, mask=q < positions, other=0.0))[:, None]
    else:
        at = (image[:, None] * groups + group[None, :]).to(tl.int64) * per_image + p[:, None]
        root = tl.sqrt(tl.load(plane_ptr + at, mask=mask, other=0.0))
    noise = _epsilon(q, channel, first, members * groups, low, high)
    place = image.to(tl.int64) * stride_image + p.to(tl.int64) * stride_position
    offset = place[:, None] + channel[None, :] * stride_channel
    y = tl.load(y_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + offset, y + (std[None, :] * root) * noise, mask=mask)


@triton.jit
def grouped_noise_gradients_kernel(
    grad_ptr, plane_ptr, log_var_ptr, key_ptr, grad_plane_ptr, partial_ptr, first, positions, per_image,
    members, groups, stride_image, stride_channel, stride_position,
    BP: tl.constexpr, TOGETHER: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the plane's gradient, and for each block of positions its part of the log-variances' gradient."""
    blocks = tl.cdiv(groups, TOGETHER)
    rows = tl.program_id(0) // blocks
    q = rows * BP + tl.arange(0, BP)
    first_group = (tl.program_id(0) % blocks) * TOGETHER
    image, p = q // per_image, q % per_image
    low, high = words(key_ptr)
    of_plane = first_group + tl.arange(0, TOGETHER)
    at = (image[:, None] * groups + of_plane[None, :]).to(tl.int64) * per_image + p[:, None]
    known = (q < positions)[:, None] & (of_plane < groups)[None, :]
    root = tl.sqrt(tl.load(plane_ptr + at, mask=known, other=0.0))
    place = image.to(tl.int64) * stride_image + p.to(tl.int64) * stride_position
    total = tl.zeros((BP, TOGETHER), tl.float32)
    for start in range(0, members, WIDTH):
        _, channel, there = _channels(first_group, start, members, groups, TOGETHER, WIDTH)
        mask = (q < positions)[:, None] & there[None, :]
        grad = tl.load(grad_ptr + place[:, None] + channel[None, :] * stride_channel, mask=mask, other=0.0)
        std = sigma(tl.load(log_var_ptr + channel, mask=there, other=0.0))
        noise = _epsilon(q, channel, first, members * groups, low, high)
        pull = grad.to(tl.float32) * noise * std[None, :]
        if TOGETHER == 1:
            total += tl.sum(pull, axis=1)[:, None]
            by_kernel = tl.sum(pull * root, axis=0)
        else:
            grouped = tl.reshape(pull, (BP, TOGETHER, WIDTH))
            total += tl.sum(grouped, axis=2)
            by_kernel = tl.reshape(tl.sum(grouped * root[:, :, None], axis=0), (TOGETHER * WIDTH,))
        tl.store(partial_ptr + rows.to(tl.int64) * (members * groups) + channel, 0.5 * by_kernel, mask=there)
    # √ has an infinite slope at 0, and ReLU makes all-zero windows.
    slope = tl.where(root > 0.0, 0.5 / tl.where(root > 0.0, root, 1.0), 0.0)
    tl.store(grad_plane_ptr + at, total * slope, mask=known)
