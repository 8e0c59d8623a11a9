"""A layer's whole noise as one autograd node, for uncompiled code on CUDA.

    forward    energy = Σx² (+ constant), its box filter, y + σ·√plane·ε
    backward   gradients of plane and log_var, the box filter's, 2·x·grad

If the layer's weight is frozen, the node also computes the layer's own gradient of its input: the kernel that writes
the noise's gradient adds it. Autograd would add the two in one more pass over three tensors.

A GPU finishes a layer in the time of a few hundred Python instructions, so launches are few: one or two forward
and two backward for most layers. Large windows, groups and odd channels take one kernel per line above.
"""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from undrift.kernels.layout import FLOATS, Seen, dense_and_seen
from undrift.kernels.reference import box_filter
from undrift.kernels.triton import launch, tiles, windows
from undrift.kernels.triton.launch import Launch, Noises, Sums
from undrift.kernels.triton.windows import Pulls, Windows


class Geometry(NamedTuple):
    """What the noise depends on of a layer.

    Attributes:
        groups: of channels.
        last: channels are the last dimension (linear layers).
        pool: window, stride and padding of the box filter; () where a window is one input.
        extra: a constant energy at each position.
    """

    groups: int
    last: bool
    pool: tuple[tuple[int, ...], ...]
    extra: float


def fits(x: Tensor, y: Tensor, log_var: Tensor) -> bool:
    """Return whether the kernels serve these tensors (y was asked about before)."""
    device = y.get_device()
    alike = x.get_device() == device == log_var.get_device()
    return alike and x.dtype in FLOATS and log_var.is_contiguous() and x.numel() > 0 and y.numel() > 0


def add_noise(
    x: Tensor,
    y: Tensor,
    log_var: Tensor,
    key: Tensor,
    geometry: Geometry,
    first_row: int,
    weight: Tensor | None = None,
) -> Tensor:
    """Return y with the noise of a layer whose input is x.

    Args:
        weight: frozen, where y is x's product with it (and a frozen bias) and nothing else: no gradient goes to y then.
    """
    x, of_x = dense_and_seen(x, geometry.last)
    if weight is not None:
        y = y.detach()
    y, of_y = dense_and_seen(y, geometry.last)
    out: Tensor = _LayerNoise.apply(x, y, log_var, (key, weight, of_x, of_y, geometry, first_row))  # type: ignore[no-untyped-call]
    return out


# One argument, as each takes PyTorch its time.
Rest = tuple[Tensor, Tensor | None, Seen, Seen, Geometry, int]


class _LayerNoise(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, log_var: Tensor, rest: Rest) -> Tensor:
        key, weight, of_x, of_y, geometry, first_row = rest
        device = y.get_device()
        plan = _forward_plan(of_x, of_y, geometry, first_row, device)
        # Rows of numbers, as PyTorch takes twice the time for a size of four.
        out, plane = torch.empty_like(y), torch.empty(plan.numbers, device=y.device, dtype=torch.float32)
        with launch.on_device(device):
            if plan.pointwise is not None:
                plan.pointwise(x, y, log_var, key, out, plane)
            else:
                energy = plane
                plan.sums.total(x, energy)
                if plan.windowed is not None:
                    plane = torch.empty(plan.windows, device=y.device, dtype=torch.float32)
                    plan.windowed(y, energy, log_var, key, out, plane)
                else:
                    energy = energy.view(plan.energy)
                    plane = box_filter(energy + plan.extra if plan.extra else energy, geometry.pool)
                    plan.noises.add(y, plane, log_var, key, out)
        ctx.save_for_backward(x if ctx.needs_input_grad[0] else None, plane, log_var, key, weight)
        ctx.rest = of_x, geometry, first_row
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        # With gradients on, a second derivative may be asked for: there is none, and this says so when it is.
        return _backward_once(ctx, grad) if torch.is_grad_enabled() else _backward(ctx, grad)


def _backward(ctx: Any, grad: Tensor) -> Any:
    x, plane, log_var, key, weight = ctx.saved_tensors
    if x is None and not ctx.needs_input_grad[2]:
        return None, grad, None, None
    of_x, geometry, first_row = ctx.rest
    grad, of_grad = dense_and_seen(grad, geometry.last)  # one copy, if any, for us and for the layer
    device = grad.get_device()
    plan = _backward_plan(of_x, of_grad, geometry, first_row, device)
    own = None if x is None or weight is None else _of_product(grad, x, weight, geometry)
    grad_x = None if x is None else torch.empty_like(x)
    with launch.on_device(device):
        if plan.pulls is not None:
            grad_log_var = torch.empty_like(log_var)
            scratch = torch.empty(plan.pulls.scratch, device=grad.device, dtype=torch.float32)
            plan.pulls.sums(grad, plane, log_var, key, scratch)
            if grad_x is None:
                plan.pulls.log_var(scratch, grad_log_var)
            else:
                both = plan.pulls.both if own is None else plan.pulls.added
                both(x, scratch, grad_x if own is None else own, grad_x, grad_log_var)
        else:
            grad_plane, grad_log_var = plan.noises.gradients(grad, plane, log_var, key)
            if grad_x is not None:
                grad_energy = _spread_back(grad_plane.view(plan.plane), plan.energy, geometry.pool)
                plan.sums.gradient(x, grad_energy, grad_x)
                grad_x = grad_x if own is None else grad_x.add_(own)
    return grad_x, grad, grad_log_var, None


_backward_once = once_differentiable(_backward)


def _of_product(grad: Tensor, x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """Return the gradient of x by a layer's product alone, in x's memory order and the product's precision."""
    weight = weight.to(grad.dtype)  # as autocast did for the product
    if geometry.last:
        return grad.matmul(weight)
    _, stride, padding = geometry.pool or ((1, 1), (1, 1), (0, 0))
    how = (stride, padding, (1, 1), False, (0, 0), geometry.groups)  # no dilation, not transposed
    found: Tensor = torch.ops.aten.convolution_backward(
        grad, x.to(grad.dtype), weight, None, *how, (True, False, False)
    )[0]
    return found if found.stride() == x.stride() else torch.empty_like(x, dtype=found.dtype).copy_(found)


def _spread_back(grad: Tensor, energy: tuple[int, ...], pool: tuple[tuple[int, ...], ...]) -> Tensor:
    """Return the gradient of the energy for one of its box filter's result."""
    if not pool:
        return grad
    like = grad.new_empty(1).expand(energy)  # only its sizes are looked at
    # Sizes are rounded down, padding counts, the sum is divided by 1.
    back: Tensor = torch.ops.aten.avg_pool2d_backward(grad, like, *pool, False, True, 1)
    return back


class _ForwardPlan(NamedTuple):
    """The launches of a forward pass: `pointwise` alone, or `sums` with `windowed` or a box filter and `noises`.

    Attributes:
        numbers, windows: in the energy and in the plane.
    """

    pointwise: Launch | None
    windowed: Launch | None
    sums: Sums
    noises: Noises
    extra: float
    energy: tuple[int, ...]
    numbers: int
    windows: int


class _BackwardPlan(NamedTuple):
    """The launches of a backward pass: `pulls`, or `noises`, the box filter's transpose and `sums`."""

    pulls: Pulls | None
    sums: Sums
    noises: Noises
    energy: tuple[int, ...]
    plane: tuple[int, ...]


@lru_cache(launch.SHAPES)
def _forward_plan(of_x: Seen, of_y: Seen, how: Geometry, first_row: int, device: int) -> _ForwardPlan:
    (x, y), (given, shape, first) = (of_x[0], of_y[0]), _shapes(of_x, of_y, how, first_row)
    grouped = how.groups > 1  # there the kernel adds no constant
    sums = launch.sums_of(given, how.groups, device, 0.0 if grouped else how.extra)
    noises = launch.noises_of(shape, how.groups, first, device)
    together, window = None, None
    if launch.halves(shape, how.groups):
        window = windows.windowed(shape, _windows(x, y, how), first, device)
        together = None if how.pool else windows.pointwise(given, shape, how.extra, first, device)
    energy = launch.energy_size(x, how.groups, how.last)
    sizes = energy, math.prod(energy), math.prod(launch.energy_size(y, how.groups, how.last))
    return _ForwardPlan(together, window, sums, noises, how.extra if grouped else 0.0, *sizes)


@lru_cache(launch.SHAPES)
def _backward_plan(of_x: Seen, of_y: Seen, how: Geometry, first_row: int, device: int) -> _BackwardPlan:
    (x, y), (given, shape, first) = (of_x[0], of_y[0]), _shapes(of_x, of_y, how, first_row)
    sums, noises = launch.sums_of(given, how.groups, device), launch.noises_of(shape, how.groups, first, device)
    halved = launch.halves(shape, how.groups)
    pulls = windows.pulls_of(given, shape, _windows(x, y, how), first, device) if halved else None
    energy, plane = (launch.energy_size(size, how.groups, how.last) for size in (x, y))
    return _BackwardPlan(pulls, sums, noises, energy, plane)


def _shapes(x: Seen, y: Seen, how: Geometry, first_row: int) -> tuple[tiles.Shape, tiles.Shape, int]:
    """Return input and output as kernels see them, and the number of the first row of ε."""
    return tiles.seen(*x, how.last), tiles.seen(*y, how.last), launch.first_of(y[0], first_row, how.last)


def _windows(x: torch.Size, y: torch.Size, how: Geometry) -> Windows:
    return Windows(how.pool, *x[2:], *y[2:]) if how.pool else Windows((), 1, 1, 1, 1)
