"""A layer's whole noise as one node of autograd, for uncompiled code on CUDA.

    forward    energy = Σx² (+ constant), its box filter, y + σ·√plane·ε
    backward   gradients of plane and log_var, the box filter's, 2·x·grad

A network calls this once a layer, and a GPU is through with a layer in the time of a few hundred Python instructions.
So all that follows from shapes is worked out once (`_Plan`), and a call is little more than its launches.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from undrift.fused import launch, tiles


class Spec(NamedTuple):
    """What of a layer the noise depends on.

    Attributes:
        last: channels are the last dimension (linear layers).
        groups: of channels.
        pool: window, stride and padding of the box filter; () where a window is one input.
        extra: a constant energy a position.
    """

    last: bool
    groups: int
    pool: tuple[tuple[int, ...], ...]
    extra: float


class _Plan:
    """All that follows from the shapes of a layer's input and output."""

    __slots__ = ("extra", "last", "like", "noises", "plane", "pool", "stride", "sums")

    def __init__(self, x: Tensor, y: Tensor, log_var: Tensor, first_row: int, spec: Spec) -> None:
        # With groups the kernel adds no constant: it is added to the plane.
        grouped = spec.groups > 1
        self.sums = launch.sums_of(x, spec.groups, spec.last, 0.0 if grouped else spec.extra)
        self.noises = launch.noises_of(y, spec.groups, spec.last, first_row, log_var)
        self.last, self.stride = spec.last, y.stride()
        self.extra = spec.extra if grouped else 0.0
        self.plane = (*x.shape[:-1], 1) if spec.last else (x.shape[0], spec.groups, *x.shape[2:])
        self.pool = spec.pool
        # The backward pass of pooling asks for its input, and looks at its sizes alone.
        self.like = torch.empty(self.plane, dtype=torch.float32, device=x.device) if spec.pool else None


_plans: dict[Any, _Plan | None] = {}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def noisy(x: Tensor, y: Tensor, log_var: Tensor, key: Tensor, first_row: int, spec: Spec) -> Tensor | None:
    """Return y with a layer's noise, or None where these tensors need the longer way."""
    asked = (x.shape, y.shape, x.stride(), y.stride(), x.dtype, y.dtype, log_var.dtype, x.get_device(), first_row, spec)
    try:
        plan = _plans[asked]
    except KeyError:
        plan = _make(x, y, log_var, first_row, spec)
        launch.keep(_plans, asked, plan)
    if plan is None:
        return None
    if torch.is_grad_enabled():
        return _apply(x, y, log_var, key, plan)  # type: ignore[no-untyped-call]
    return _forward(x, y, log_var, key, plan)[0]


def _make(x: Tensor, y: Tensor, log_var: Tensor, first_row: int, spec: Spec) -> _Plan | None:
    known = x.dtype in _DTYPES and y.dtype in _DTYPES and log_var.is_contiguous()
    if not known or not x.numel() or not y.numel() or len({x.device, y.device, log_var.device}) > 1:
        return None
    if tiles.dense(x, spec.last) is not x or tiles.dense(y, spec.last) is not y:
        return None
    return _Plan(x, y, log_var, first_row, spec)


def _forward(x: Tensor, y: Tensor, log_var: Tensor, key: Tensor, plan: _Plan) -> tuple[Tensor, Tensor]:
    plane = torch.empty(plan.plane, dtype=torch.float32, device=x.device)
    plan.sums.total(x, plane)
    if plan.extra:
        plane += plan.extra
    if plan.pool:
        window, stride, padding = plan.pool
        plane = torch._C._nn.avg_pool2d(plane, window, stride, padding, False, True, 1)
    out = torch.empty_like(y)
    plan.noises.add(y, plane, log_var, key, out)
    return out, plane


class _Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, log_var: Tensor, key: Tensor, plan: _Plan) -> Tensor:
        out, plane = _forward(x, y, log_var, key, plan)
        ctx.save_for_backward(x if ctx.needs_input_grad[0] else None, plane, log_var, key)
        ctx.plan = plan
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        # With gradients on, a second derivative is asked for; there is none, and the longer way says so.
        return _backward_once(ctx, grad) if torch.is_grad_enabled() else _backward(ctx, grad)


# Past Function's own apply: it asks for functorch, as `dispatch.quick` has.
_apply = super(torch.autograd.Function, _Noisy).apply


def _backward(ctx: Any, grad: Tensor) -> Any:
    x, plane, log_var, key = ctx.saved_tensors
    plan: _Plan = ctx.plan
    dense = grad
    if grad.stride() != plan.stride:
        dense = torch.empty_strided(grad.shape, plan.stride, dtype=grad.dtype, device=grad.device).copy_(grad)
    grad_plane, grad_log_var = plan.noises.gradients(dense, plane, log_var, key)
    grad_x = None
    if ctx.needs_input_grad[0]:
        if plan.pool:
            grad_plane = torch.ops.aten.avg_pool2d_backward.default(grad_plane, plan.like, *plan.pool, False, True, 1)
        grad_x = torch.empty_like(x)
        plan.sums.gradient(x, grad_plane, grad_x)
    return grad_x, grad, grad_log_var, None, None


_backward_once = torch.autograd.function.once_differentiable(_backward)
