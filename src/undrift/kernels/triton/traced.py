"""Register the functions for graphs compiled for CUDA, as operators that the compiler can inline.

The compiler launches Triton's kernels itself, and fuses PyTorch's operators around them: the sum of squares with the
kernel that writes x, 2·x·grad with the one that reads the gradient. ε and its two sums stay in our kernels: with
PyTorch's operators, the compiler draws ε again in each kernel that reads the output (on an H200 a WRN-28-10 step takes
26.9 ms then, and Tent's 13.3).

The energy's gradient is stored with gaps. A kernel of the compiler that sums over positions (a batch norm's gradients)
reads other tensors along channels. A tensor that is contiguous along positions it reads along positions, and then
exchanges among its threads through shared memory, which takes up to twice the time (on an H200 55 µs instead of 27;
with gaps 36 to 41, benchmarks/NOTES.md, version 13). Non-contiguous values it reads in the order that it needs. (Behind
a layer norm, which sums over channels, gaps would cost a little, so a linear layer's plane has none.)
"""

from typing import Any

import torch
from torch import Tensor
from torch.library import triton_op, wrap_triton

from undrift.kernels import operator_gradients, reference
from undrift.kernels.layout import dense
from undrift.kernels.triton import tiles
from undrift.kernels.triton.kernels_grouped import grouped_add_noise_kernel, grouped_noise_gradients_kernel
from undrift.kernels.triton.kernels_halves import (
    LEAST,
    add_noise_in_place_kernel,
    add_noise_kernel,
    apart_kernel,
    finish_kernel,
    noise_gradients_kernel,
)
from undrift.kernels.triton.kernels_shared import add_pulls_kernel, noise_parts_kernel
from undrift.kernels.triton.launch import FINISH, SUMMING, Launch, Noises, first_of, halves
from undrift.kernels.triton.tiles import cdiv

APART = 4  # 16 bytes
_BLOCK = 1024


def _plan(y: Tensor, plane: Tensor, first_row: int, groups: int, last: bool) -> Noises:
    runs = plane.shape[-1] if last else 1
    return Noises(tiles.shape_of(y, last), groups, first_of(y.shape, first_row, last), y.device.index or 0, runs)


@triton_op("undrift::add_noise_traced", mutates_args=())
def add_noise(
    y: Tensor,
    plane: Tensor,
    log_var: Tensor,
    key: Tensor,
    first_row: int,
    groups: int,
    last: bool,
    handle: Tensor | None = None,  # noqa: ARG001
    by_rows: bool = False,  # noqa: ARG001
) -> Tensor:
    """Return y + σ·√plane·ε in y's dtype and memory format.

    A linear layer's plane may come in parts (…, parts). log_var's gradient goes to its `handle`, where it has one; the
    plane's is then for somebody who may read it `by_rows`.
    """
    y = dense(y, last)
    if y.numel() == 0:
        return torch.empty_like(y)
    plan = _plan(y, plane, first_row, groups, last)
    call = plan.add
    if plan.finish is None:
        out, plane = torch.empty_like(y), _added(plane, last)
        wrap_triton(grouped_add_noise_kernel)[call.grid](
            y, plane.contiguous(), log_var, key, out, *call.numbers, **call.constants
        )
        return out
    tensors, how = (plane.contiguous(), log_var, key), call.constants | {"num_warps": call.warps}
    if _whole_lines(y, call):
        out = y.clone()  # which the compiler leaves out where nobody else reads y: as much memory less in the cache
        wrap_triton(add_noise_in_place_kernel)[call.grid](out, *tensors, *call.numbers, **how)
    else:
        out = torch.empty_like(y)
        wrap_triton(add_noise_kernel)[call.grid](y, *tensors, out, *call.numbers, **how)
    return out


def _added(plane: Tensor, last: bool) -> Tensor:
    """Return a plane that is in one part: the kernels for groups, and for odd numbers of channels, add nothing up."""
    return plane.sum(-1, keepdim=True).contiguous() if last and plane.shape[-1] != 1 else plane


def _whole(plane: Tensor, last: bool) -> tuple[int, ...]:
    """Return the shape of a plane's gradient: all its parts have one."""
    return (*plane.shape[:-1], 1) if last else tuple(plane.shape)


_LINE = 128  # bytes


def _whole_lines(y: Tensor, call: Launch) -> bool:
    """Return whether no two programs share a cache line of y.

    In place, one would wait for what the other writes: 64 µs instead of 43 (80 pairs of channels, 32 at a time, H200).
    """
    return bool(call.constants["LAST"]) and call.constants["WIDTH"] * y.element_size() % _LINE == 0


@triton_op("undrift::noise_gradients_traced", mutates_args=())
def noise_gradients(
    grad: Tensor, plane: Tensor, log_var: Tensor, key: Tensor, first_row: int, groups: int, last: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of plane and log_var for a gradient of `add_noise`'s output; ε is drawn again."""
    if grad.numel() == 0:
        return torch.zeros_like(plane), torch.zeros_like(log_var)
    grad, plane = dense(grad, last), plane.contiguous()
    plan = _plan(grad, plane, first_row, groups, last)
    call = plan.sums
    scratch = torch.empty(plan.partial, dtype=torch.float32, device=plane.device)
    if plan.finish is None:
        whole = _added(plane, last)
        grad_plane = torch.empty_like(whole)
        wrap_triton(grouped_noise_gradients_kernel)[call.grid](
            grad, whole, log_var, key, grad_plane, scratch, *call.numbers, **call.constants
        )
        return grad_plane.expand(plane.shape), scratch.sum(0).to(log_var.dtype)
    grad_log_var = torch.empty_like(log_var)
    wrap_triton(noise_gradients_kernel)[call.grid](
        grad, plane, log_var, key, scratch, *call.numbers, **call.constants, num_warps=call.warps
    )
    finish, gap = plan.finish, 1 if last else APART
    spaced = torch.empty((*_whole(plane, last), gap), dtype=torch.float32, device=plane.device)
    wrap_triton(finish_kernel)[finish.grid](
        scratch,
        plane,
        spaced,
        grad_log_var,
        *finish.numbers,
        **finish.constants | {"APART": gap},
        num_warps=finish.warps,
    )
    return spaced[..., 0].expand(plane.shape), grad_log_var


@triton_op("undrift::noise_parts_traced", mutates_args=())
def noise_parts(
    grad: Tensor,
    plane: Tensor,
    log_var: Tensor,
    key: Tensor,
    first_row: int,
    groups: int,
    last: bool,
    count: int,
    by_rows: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of plane, and log_var's in so many parts, for a gradient of `add_noise`'s output.

    What reads the plane's gradient `by_rows`, once for all channels, adds up its blocks of channels itself.
    """
    shape = tiles.shape_of(dense(grad, last), last)
    if count == 1 or grad.numel() == 0 or not halves(shape, groups):
        grad_plane, grad_log_var = noise_gradients(grad, plane, log_var, key, first_row, groups, last)
        return grad_plane, grad_log_var.float().expand(count, -1) / count
    grad, plane = dense(grad, last), plane.contiguous()
    first = first_of(grad.shape, first_row, last)
    half, gpus = shape.channels // 2, tiles.processors(grad.device.index or 0)
    cut = tiles.pair_tile(shape, half, gpus, SUMMING)
    blocks, gap, runs = cut.programs[1], 1 if last else APART, plane.shape[-1] if last else 1
    parts = plane.new_empty((count, shape.channels), dtype=torch.float32)
    whole = _whole(plane, last)
    spaced = plane.new_empty((*whole, gap), dtype=torch.float32)
    alone = blocks == 1
    pulls = spaced if alone else plane.new_empty(blocks * shape.positions, dtype=torch.float32)
    wrap_triton(noise_parts_kernel)[count, blocks](
        grad, plane, log_var, key, pulls, parts, first, shape.positions, shape.per_image, half,
        LAST=shape.last, WIDE=shape.wide, BP=cut.positions, WIDTH=cut.width, RUNS=runs, SLOPED=alone,
        APART=gap if alone else 1, num_warps=SUMMING.warps,
    )  # fmt: skip
    if by_rows and last and 1 < blocks <= _BY_ROWS:
        first_pull, *others = pulls.view(blocks, -1).unbind()
        total = sum(others, start=first_pull)
        slope = 0.5 / plane.view(-1, runs).sum(-1).clamp(min=LEAST)
        return (total * slope).view(whole).expand(plane.shape), parts
    if not alone:
        side = min(FINISH["BLOCKS"], tiles.power(blocks))
        wrap_triton(add_pulls_kernel)[(cdiv(shape.positions, FINISH["PLANE"]),)](
            pulls, plane, spaced, shape.positions, blocks, PLANE=FINISH["PLANE"], BLOCKS=side, RUNS=runs, APART=gap
        )
    return spaced[..., 0].expand(plane.shape), parts


_BY_ROWS = 16  # blocks of channels


@triton_op("undrift::apart_traced", mutates_args=())
def apart(values: Tensor) -> Tensor:
    """Return numbers with gaps between them in memory."""
    spaced = torch.empty((*values.shape, APART), dtype=values.dtype, device=values.device)
    if count := values.numel():
        programs = (tiles.cdiv(count, _BLOCK),)
        wrap_triton(apart_kernel)[programs](values.contiguous(), spaced, count, BLOCK=_BLOCK, APART=APART)
    return spaced[..., 0]


operator_gradients.of_add_noise(add_noise, noise_gradients, noise_parts)


# The energy ------------------------------------------------------------------------------------------------------


@triton_op("undrift::square_sum_traced", mutates_args=())
def square_sum(x: Tensor, groups: int, last: bool) -> Tensor:
    """Return Σ x² over each group's channels, in float32.

    In plain operators, which the compiler fuses with what makes x, and with a gradient from x as it is: left to
    autograd, the backward pass would want 2·x in float32, and the compiler keeps that beside x. An autograd.Function
    makes the same graph, but to trace one the compiler does what PyTorch warns of: under -W error that ends the run.
    """
    return reference.square_sum(x, groups, last)


def _arranged(grad: Tensor, last: bool) -> Tensor:
    return grad if last or not grad.is_cuda or grad.stride(-1) == APART else apart(grad)


operator_gradients.of_square_sum(square_sum, _arranged)


def in_parts(x: Tensor) -> bool:
    """Return whether the energy of a linear layer's input is better summed in parts.

    The compiler reads a row that it cannot hold 2,048 numbers at a time: of 1,536, a quarter of its threads has none
    (on an H200 44 µs instead of 31). Runs of a power of two it holds.
    """
    channels = x.shape[-1]
    return channels > _PERSISTENT and _RUN <= channels & -channels < channels


_PERSISTENT, _RUN = 1024, 256


@triton_op("undrift::square_parts_traced", mutates_args=())
def square_parts(x: Tensor) -> Tensor:
    """Return Σ x² over runs of channels (…, parts), in float32: what reads them adds them up."""
    channels = x.shape[-1]
    return reference.square_sum(x.unflatten(-1, (-1, channels & -channels)), 1, True).squeeze(-1)


def _keep_x(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    ctx.save_for_backward(*inputs)


def _of_square_parts(ctx: Any, grad: Tensor) -> Any:
    (x,) = ctx.saved_tensors
    return reference.square_sum_gradient(grad.unsqueeze(-1), x.unflatten(-1, (grad.shape[-1], -1)), 1, True).flatten(-2)


square_parts.register_autograd(_of_square_parts, setup_context=_keep_x)


# A linear layer's input --------------------------------------------------------------------------------------------


@triton_op("undrift::narrowed_traced", mutates_args=())
def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in a lower precision, with a gradient that is kept in it: a layer norm's output, for a linear layer.

    Two kernels read that gradient, a sum of the layer's own and its energy's. Left to itself, the compiler keeps the
    sum in float32 for the second.
    """
    return x.to(dtype)


def _keep_dtype(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    ctx.dtype = inputs[0].dtype


def _of_narrowed(ctx: Any, grad: Tensor) -> Any:
    # What is given strides the compiler must have in memory: as it is, in the lower precision.
    kept = grad.as_strided(grad.shape, grad.stride()) if grad.is_contiguous() else grad
    return kept.to(ctx.dtype), None


narrowed.register_autograd(_of_narrowed, setup_context=_keep_dtype)
