"""All layers' log-variances with one gradient, in a graph compiled for CUDA that holds both their noise and their KL.

Left to autograd, each layer's noise adds up a gradient of its own, and one more kernel a layer adds the KL's. Here a
layer's noise leaves its gradient in parts, and few kernels add up all layers' parts, and the KL's, at the end. What
autograd takes a layer's parts for is the gradient of its `handle`: a tensor of their shape that nobody reads.
"""

from typing import Any

import torch
from torch import Tensor
from torch.library import triton_op, wrap_triton

from undrift.fused import tiles, traced
from undrift.fused.kernels_shared import add_layers_kernel, add_pulls_kernel, noise_parts_kernel
from undrift.fused.launch import FINISH, SUMMING, first_of, halves
from undrift.fused.tiles import Shape, cdiv

_MOST = 1 << 40  # positions: more than anybody has
_TOGETHER = 16  # layers to a kernel
_ADDING = {"ROWS": 256, "COLUMNS": 8}
_BY_ROWS = 16  # blocks of channels
_LEAST = 1.2e-38  # as `kernels.slope` has it


@triton_op("undrift::spread_traced", mutates_args=())
def spread(log_vars: list[Tensor], groups: list[int], last: list[bool]) -> list[Tensor]:
    """Return log-variances as one row, for the KL, and a handle for the noise of each."""
    layers = zip(log_vars, groups, last, strict=True)
    handles = [v.new_empty((_count_of(v, n, order), len(v)), dtype=torch.float32) for v, n, order in layers]
    return [torch.cat(log_vars), *handles]


def _count_of(log_var: Tensor, groups: int, last: bool) -> int:
    """Return how many parts a layer leaves its gradient in: its programs along positions, where there are many."""
    shape = Shape(_MOST, 1, len(log_var), last)
    if not halves(shape, groups):
        return 1
    return tiles.pair_tile(shape, len(log_var) // 2, tiles.processors(log_var.device.index or 0), SUMMING).programs[0]


def _keep_sizes(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001
    ctx.sizes = [len(v) for v in inputs[0]]


def _of_spread(ctx: Any, grads: list[Tensor]) -> Any:
    return list(add_layers(grads[1:], grads[0]).split(ctx.sizes)), None, None


spread.register_autograd(_of_spread, setup_context=_keep_sizes)


@triton_op("undrift::add_layers_traced", mutates_args=())
def add_layers(parts: list[Tensor], more: Tensor) -> Tensor:
    """Return one row of gradients: of each layer the sum of its parts, and `more`."""
    out = torch.empty_like(more)
    alike: dict[tuple[int, ...], list[tuple[Tensor, int]]] = {}
    start = 0
    for own in parts:
        alike.setdefault(tuple(own.shape), []).append((own.contiguous(), start))
        start += own.shape[1]
    for (count, channels), found in alike.items():
        for first in range(0, len(found), _TOGETHER):
            some = found[first : first + _TOGETHER]
            tensors, starts = zip(*some, *[some[0]] * (_TOGETHER - len(some)), strict=True)
            wrap_triton(add_layers_kernel)[cdiv(channels, _ADDING["COLUMNS"]), len(some)](
                *tensors, more, out, *starts, channels, count, **_ADDING
            )
    return out


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

    Who reads the plane's gradient `by_rows`, once for all channels, adds up its blocks of channels itself.
    """
    if count == 1 or grad.numel() == 0:
        grad_plane, grad_log_var = traced.noise_gradients(grad, plane, log_var, key, first_row, groups, last)
        return grad_plane, grad_log_var.float().expand(count, -1) / count
    grad, plane = tiles.dense(grad, last), plane.contiguous()
    shape, first = tiles.shape_of(grad, last), first_of(grad, first_row, last)
    half, gpus = shape.channels // 2, tiles.processors(grad.device.index or 0)
    cut = tiles.pair_tile(shape, half, gpus, SUMMING)
    blocks, gap, runs = cut.programs[1], 1 if last else traced.APART, plane.shape[-1] if last else 1
    parts = plane.new_empty((count, shape.channels), dtype=torch.float32)
    whole = (*plane.shape[:-1], 1) if last else plane.shape  # all parts of a plane have one gradient
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
        slope = 0.5 / plane.view(-1, runs).sum(-1).clamp(min=_LEAST)
        return (total * slope).view(whole).expand(plane.shape), parts
    if not alone:
        side = min(FINISH["BLOCKS"], tiles.power(blocks))
        wrap_triton(add_pulls_kernel)[(cdiv(shape.positions, FINISH["PLANE"]),)](
            pulls, plane, spaced, shape.positions, blocks, PLANE=FINISH["PLANE"], BLOCKS=side, RUNS=runs, APART=gap
        )
    return spaced[..., 0].expand(plane.shape), parts
