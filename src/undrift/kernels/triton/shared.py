"""Compute the gradient of all layers' log-variances together, in a graph compiled for CUDA with noise and KL.

Autograd would sum a gradient for each layer's noise, and add the KL's in one more kernel per layer. Here a layer's
noise writes partial sums of its gradient (`traced.noise_parts`), and a few kernels add up all layers' parts, and the
KL's, at the end. To autograd, a layer's parts are the gradient of its `handle`, an unused tensor of their shape.
"""

from typing import Any, List, Sequence  # noqa: UP035  (PyTorch 2.6 knows these two in an operator's signature)

import torch
from torch import Tensor
from torch.library import triton_op, wrap_triton

from undrift.kernels.triton import tiles
from undrift.kernels.triton.kernels_shared import add_layers_kernel
from undrift.kernels.triton.launch import SUMMING, halves
from undrift.kernels.triton.tiles import Shape, cdiv

_MOST = 1 << 40  # positions: more than anybody has
_TOGETHER = 16  # layers to a kernel
_ADDING = {"ROWS": 256, "COLUMNS": 8}


@triton_op("undrift::spread_traced", mutates_args=())
def spread(log_vars: Sequence[Tensor], groups: Sequence[int], last: Sequence[bool]) -> List[Tensor]:  # noqa: UP006
    """Return log-variances as one row, for the KL, and a handle for the noise of each.

    Args:
        log_vars: vectors of one dtype and device.
        groups: of each layer's channels.
        last: whether channels are neighbours in each layer's output.
    """
    layers = zip(log_vars, groups, last, strict=True)
    handles = [v.new_empty((_count_of(v, n, order), len(v)), dtype=torch.float32) for v, n, order in layers]
    return [torch.cat(list(log_vars)), *handles]


def _count_of(log_var: Tensor, groups: int, last: bool) -> int:
    """Return how many parts a layer leaves its gradient in: its programs along positions, where there are many."""
    shape = Shape(_MOST, 1, len(log_var), last)
    if not halves(shape, groups):
        return 1
    return tiles.pair_tile(shape, len(log_var) // 2, tiles.processors(log_var.device.index or 0), SUMMING).programs[0]


def _keep_sizes(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001
    ctx.sizes = [len(v) for v in inputs[0]]


def _of_spread(ctx: Any, grads: Sequence[Tensor]) -> Any:
    return list(add_layers(grads[1:], grads[0]).split(ctx.sizes)), None, None


spread.register_autograd(_of_spread, setup_context=_keep_sizes)


@triton_op("undrift::add_layers_traced", mutates_args=())
def add_layers(parts: Sequence[Tensor], more: Tensor) -> Tensor:
    """Return one row of gradients: of each layer the sum of its parts, and `more`."""
    more = _held(more)
    out = torch.empty_like(more)
    alike: dict[tuple[int, ...], list[tuple[Tensor, int]]] = {}
    start = 0
    for own in parts:
        alike.setdefault(tuple(own.shape), []).append((_held(own), start))
        start += own.shape[1]
    for (count, channels), found in alike.items():
        for first in range(0, len(found), _TOGETHER):
            some = found[first : first + _TOGETHER]
            tensors, starts = zip(*some, *[some[0]] * (_TOGETHER - len(some)), strict=True)
            wrap_triton(add_layers_kernel)[cdiv(channels, _ADDING["COLUMNS"]), len(some)](
                *tensors, more, out, *starts, channels, count, **_ADDING
            )
    return out


def _held(tensor: Tensor) -> Tensor:
    """Return a tensor that lies in memory: what is given strides the compiler writes once, and else for each kernel."""
    tensor = tensor.contiguous()
    return tensor.as_strided(tensor.shape, tensor.stride())
