"""Triton's kernels of the noise. This file is imported on a CUDA machine only.

A tensor is seen as positions × channels, wherever its memory has them: position q = image · P + p, and the strides of
image, channel and p are arguments. A program works on BP positions and on TOGETHER groups of channels at once, WIDTH
channels of each at a time; narrow groups (depthwise convolutions) share a program, wide ones are looped over.

Every sum is made in one fixed order: sums over channels inside a program, sums over positions as one row of partial
sums a program, added up afterwards. No atomics: the same key and gradient give the same bits.
"""

# mypy: ignore-errors
# ruff: noqa: N803
# Triton compiles these functions itself: they are not typed Python, and their compile-time constants are in capitals.

import os

import torch
import triton
import triton.language as tl

from undrift.fused.epsilon import FACTORS, HALF, SHIFTS, SINE

_S0, _S1, _S2, _S3 = (tl.constexpr(s) for s in SHIFTS)
_F0, _F1, _F2 = (tl.constexpr(f) for f in FACTORS)
_P0, _P1, _P2, _P3 = (tl.constexpr(c) for c in SINE)
_HALF = tl.constexpr(HALF)
# NVIDIA's own instruction; neither AMD's compiler nor Triton's interpreter knows it.
_FAST = tl.constexpr(torch.version.cuda is not None and os.environ.get("TRITON_INTERPRET") != "1")


@triton.jit
def _log2(u):
    """Return log₂ u for u in (0, 1), to 2^-22: Triton's own takes fifteen more instructions for the last bits."""
    if _FAST:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [u], tl.float32, is_pure=True, pack=1)
    return tl.log2(u)


@triton.jit
def _epsilon(counter, low, high):
    """Return ε (`single` of undrift.fused.epsilon) for 32-bit counters; low and high are the key's words."""
    z = counter + low
    z = (z ^ (z >> _S0)) * _F0 + high
    z = (z ^ (z >> _S1)) * _F1
    z = (z ^ (z >> _S2)) * _F2
    z = z ^ (z >> _S3)
    u = (z >> 12).to(tl.int32).to(tl.float32) * 9.5367431640625e-07 + 4.76837158203125e-07
    angle = (z & 4095).to(tl.int32).to(tl.float32) - _HALF
    square = angle * angle
    sine = ((_P3 * square + _P2) * square + _P1) * square + _P0
    return tl.sqrt(-_log2(u)) * (sine * angle)


@triton.jit
def _words(key_ptr):
    key = tl.load(key_ptr)
    return (key & 0xFFFFFFFF).to(tl.uint32), ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def _channels(first_group, start, members, groups, TOGETHER: tl.constexpr, WIDTH: tl.constexpr):
    """Return, for each column of a tile, its group, its channel, and whether there is such a channel."""
    column = tl.arange(0, TOGETHER * WIDTH)
    group = first_group + column // WIDTH
    member = start + column % WIDTH
    return group, group * members + member, (group < groups) & (member < members)


@triton.jit
def square_sum_kernel(
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
def square_sum_gradient_kernel(
    x_ptr, grad_ptr, out_ptr, positions, per_image, members, groups, stride_image, stride_channel, stride_position,
    BP: tl.constexpr, TOGETHER: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write 2·x·grad; out has x's strides."""
    wide = tl.cdiv(members, WIDTH)
    blocks = tl.cdiv(groups, TOGETHER) * wide
    q = (tl.program_id(0) // blocks) * BP + tl.arange(0, BP)
    block = tl.program_id(0) % blocks
    image, p = q // per_image, q % per_image
    place = image.to(tl.int64) * stride_image + p.to(tl.int64) * stride_position
    group, channel, there = _channels(
        (block // wide) * TOGETHER, (block % wide) * WIDTH, members, groups, TOGETHER, WIDTH
    )
    mask = (q < positions)[:, None] & there[None, :]
    offset = place[:, None] + channel[None, :] * stride_channel
    x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    if TOGETHER == 1:
        at = (image * groups + block // wide).to(tl.int64) * per_image + p
        grad = tl.load(grad_ptr + at, mask=q < positions, other=0.0)[:, None]
    else:
        at = (image[:, None] * groups + group[None, :]).to(tl.int64) * per_image + p[:, None]
        grad = tl.load(grad_ptr + at, mask=mask, other=0.0)
    tl.store(out_ptr + offset, 2.0 * x * grad, mask=mask)


@triton.jit
def add_noise_kernel(
    y_ptr, plane_ptr, log_var_ptr, key_ptr, out_ptr, origin, positions, per_image, members, groups,
    stride_image, stride_channel, stride_position, count_channel, count_position,
    BP: tl.constexpr, TOGETHER: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write y + σ·√plane·ε; out has y's strides."""
    wide = tl.cdiv(members, WIDTH)
    blocks = tl.cdiv(groups, TOGETHER) * wide
    q = (tl.program_id(0) // blocks) * BP + tl.arange(0, BP)
    block = tl.program_id(0) % blocks
    image, p = q // per_image, q % per_image
    low, high = _words(key_ptr)
    group, channel, there = _channels(
        (block // wide) * TOGETHER, (block % wide) * WIDTH, members, groups, TOGETHER, WIDTH
    )
    mask = (q < positions)[:, None] & there[None, :]
    sigma = tl.exp(0.5 * tl.load(log_var_ptr + channel, mask=there, other=0.0).to(tl.float32))
    if TOGETHER == 1:
        at = (image * groups + block // wide).to(tl.int64) * per_image + p
        root = tl.sqrt(tl.load(plane_ptr + at, mask=q < positions, other=0.0))[:, None]
    else:
        at = (image[:, None] * groups + group[None, :]).to(tl.int64) * per_image + p[:, None]
        root = tl.sqrt(tl.load(plane_ptr + at, mask=mask, other=0.0))
    row = image * (per_image * members * groups) + p * count_position + origin
    counter = row.to(tl.uint32)[:, None] + (channel * count_channel).to(tl.uint32)[None, :]
    place = image.to(tl.int64) * stride_image + p.to(tl.int64) * stride_position
    offset = place[:, None] + channel[None, :] * stride_channel
    y = tl.load(y_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + offset, y + (sigma[None, :] * root) * _epsilon(counter, low, high), mask=mask)


@triton.jit
def noise_gradients_kernel(
    grad_ptr, plane_ptr, log_var_ptr, key_ptr, grad_plane_ptr, partial_ptr, origin, positions, per_image,
    members, groups,
    stride_image, stride_channel, stride_position, count_channel, count_position,
    BP: tl.constexpr, TOGETHER: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the plane's gradient, and for each block of positions its part of the log-variances' gradient."""
    blocks = tl.cdiv(groups, TOGETHER)
    rows = tl.program_id(0) // blocks
    q = rows * BP + tl.arange(0, BP)
    first_group = (tl.program_id(0) % blocks) * TOGETHER
    image, p = q // per_image, q % per_image
    low, high = _words(key_ptr)
    of_plane = first_group + tl.arange(0, TOGETHER)
    at = (image[:, None] * groups + of_plane[None, :]).to(tl.int64) * per_image + p[:, None]
    known = (q < positions)[:, None] & (of_plane < groups)[None, :]
    root = tl.sqrt(tl.load(plane_ptr + at, mask=known, other=0.0))
    row = (image * (per_image * members * groups) + p * count_position + origin).to(tl.uint32)
    place = image.to(tl.int64) * stride_image + p.to(tl.int64) * stride_position
    total = tl.zeros((BP, TOGETHER), tl.float32)
    for start in range(0, members, WIDTH):
        _, channel, there = _channels(first_group, start, members, groups, TOGETHER, WIDTH)
        mask = (q < positions)[:, None] & there[None, :]
        grad = tl.load(grad_ptr + place[:, None] + channel[None, :] * stride_channel, mask=mask, other=0.0)
        sigma = tl.exp(0.5 * tl.load(log_var_ptr + channel, mask=there, other=0.0).to(tl.float32))
        counter = row[:, None] + (channel * count_channel).to(tl.uint32)[None, :]
        pull = grad.to(tl.float32) * _epsilon(counter, low, high) * sigma[None, :]
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
