"""A layer's whole noise as one node of autograd, for uncompiled code on CUDA.

    forward    energy = Σx² (+ constant), its box filter, y + σ·√plane·ε
    backward   gradients of plane and log_var, the box filter's, 2·x·grad + the layer's own (`own`)

A network calls this once a layer, and a GPU is through with a layer in the time of a few hundred Python instructions.
So all that follows from shapes is worked out once (`Plan`), and a call is little more than its launches.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from undrift.kernels.triton import folded, launch, native, tiles
from undrift.kernels.triton.calls import Call, in_turn
from undrift.kernels.triton.own import asked, own_gradient, own_of
from undrift.posterior import layers
from undrift.posterior.replay import unhooked


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


class Plan:
    """All that follows from a layer and the shapes of its input and output.

    `joined` sums over channels and adds noise at once, `filtered` the box filter and noise, `pulls` makes both
    gradients; where they are None, there are groups or large windows, and each step is a kernel of its own.
    """

    __slots__ = (
        "_native", "energy", "extra", "filtered", "joined", "last", "like", "noises", "plane", "pool", "pulls",
        "stride", "sums",
    )  # fmt: skip

    def __init__(self, x: Tensor, y: Tensor, log_var: Tensor, first_row: int, spec: Spec) -> None:
        # With groups the kernel adds no constant: it is added to the plane.
        grouped = spec.groups > 1
        self.sums = launch.sums_of(x, spec.groups, spec.last, 0.0 if grouped else spec.extra)
        self.noises = launch.noises_of(y, spec.groups, spec.last, first_row, log_var)
        self.filtered: Call | None = None
        self.joined: Call | None = None
        self.pulls: folded.Pulls | None = None
        if folded.fits(y, spec.groups, spec.last):
            first, windows = launch.first_of(y, first_row, spec.last), folded.windows_of(x, y, spec.pool)
            given, shape = tiles.shape_of(x, spec.last), tiles.shape_of(y, spec.last)
            self.filtered = folded.adding(shape, windows, first, y.get_device())
            if not spec.pool:
                self.joined = folded.joining(given, shape, spec.extra, first, y.get_device())
            self.pulls = folded.pulls_of(x, y, spec.last, windows, first)
        self.last, self.stride = spec.last, y.stride()
        self.extra = spec.extra if grouped else 0.0
        energy = (*x.shape[:-1], 1) if spec.last else (x.shape[0], spec.groups, *x.shape[2:])
        # One number each, spread: tensors like them are made in half the time that sizes, dtype and device take.
        self.energy = x.new_empty(1, dtype=torch.float32).expand(energy)
        self.plane = x.new_empty(1, dtype=torch.float32).expand(y.shape[0], 1, *y.shape[2:])
        # After window, stride and padding: sizes are rounded down, padding counts, and the sum is divided by 1.
        self.pool: tuple[Any, ...] = (*spec.pool, False, True, 1) if spec.pool else ()
        # The backward pass of pooling asks for its input, and looks at its sizes alone.
        wanted = spec.pool and self.pulls is None and not _own_transpose(*spec.pool)
        self.like = torch.empty_like(self.energy) if wanted else None
        self._native: Any = None

    def native(self) -> Any:
        """Return this plan for `native.module`, None where that is not there."""
        if self._native is None and native.module is not None:
            self._native = self._for_native()
        return self._native

    def _for_native(self) -> Any:
        pulls, noises = self.pulls, self.noises
        none: tuple[Call | None, ...] = (None, None, None)
        back = (pulls.sums, pulls.log_var, pulls.both, pulls.added, None, None) if pulls is not None else (
            noises.sums, *none, noises.finish, self.sums.gradient
        )  # fmt: skip
        scratch = self.energy.new_empty(1).expand(noises.partial) if pulls is None else pulls.scratch
        pool = tuple(number for pair in self.pool[:3] for number in pair)
        rest = (self.energy, self.plane, scratch, self.like, pool, self.extra, self.stride, self.last, asked)
        return native.module.plan(self.joined, self.sums.total, self.filtered, noises.add, *back, *rest)


def _own_transpose(window: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...]) -> bool:
    """Return whether a box filter is its own gradient: p is in the window around q where q is in the one around p."""
    return max(stride) == 1 and all(k == 2 * p + 1 for k, p in zip(window, padding, strict=True))


_plans: dict[Any, Plan | None] = {}


def plan_of(layer: Any, x: Tensor, y: Tensor, log_var: Tensor, offset: float, rank: int = 0) -> Plan | None:
    """Return how such tensors get a layer's noise by one node of autograd, or None where they need the longer way.

    Of several processes each has a `rank`, and rows behind those of the ranks before it. All that the plan follows from
    is looked at in each call: layers and tensors may have changed.
    """
    own = layer.in_features if isinstance(layer, nn.Linear) else (
        type(layer), layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.padding_mode, layer.groups,
        layer.in_channels,
    )  # fmt: skip
    asked = (
        own, offset, rank, x.shape, y.shape, x.stride(), y.stride(), x.dtype, y.dtype, log_var.dtype,
        x.get_device(), log_var.get_device(),
    )  # fmt: skip
    try:
        return _plans[asked]
    except KeyError:
        spec, dims = spec_of(layer, offset)
        plan = None if spec is None or y.ndim <= dims else _make(x, y, log_var, rank * y.shape[0], spec)
        launch.keep(_plans, asked, plan)
        return plan


def spec_of(layer: Any, offset: float) -> tuple[Spec | None, int]:
    """Return what the noise must know of a layer (None: more than fits), and the dimensions of an unbatched output."""
    if isinstance(layer, nn.Linear):
        return Spec(True, 1, (), offset * layer.in_features), 1
    pool, dims = layers.pool(layer), len(layer.kernel_size) + 1
    extra = offset * (layer.in_channels // layer.groups)
    return None if pool is None else Spec(False, layer.groups, pool, extra), dims


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _make(x: Tensor, y: Tensor, log_var: Tensor, first_row: int, spec: Spec) -> Plan | None:
    known = x.dtype in _DTYPES and y.dtype in _DTYPES and log_var.is_contiguous()
    if not known or not x.numel() or not y.numel() or len({x.device, y.device, log_var.device}) > 1:
        return None
    if tiles.dense(x, spec.last) is not x or tiles.dense(y, spec.last) is not y:
        return None
    return Plan(x, y, log_var, first_row, spec)


def noisy(x: Tensor, y: Tensor, log_var: Tensor, key: Tensor, plan: Plan, frozen: bool = False) -> Tensor:
    """Return y with a layer's noise; `frozen`: of what the layer made y of, x alone may want a gradient."""
    if not torch.is_grad_enabled():
        return _Noisy.forward(None, x, None, None, (y, log_var, key, plan, None, None))
    # What is hooked (a checkpoint) may be asked for once, and autograd asks the layer's node again, for nothing.
    own = own_of(y) if frozen and plan.pulls is not None and x.requires_grad and unhooked() else None
    return _apply(x, y if own is None else None, log_var, (y, log_var, key, plan, own, None))  # type: ignore[no-untyped-call]


# y, log_var, key, plan, the layer's own node where that is run here, and where log_var's gradient is to be written.
Rest = tuple[Tensor, Tensor, Tensor, Plan, Any, Any]


class _Noisy(torch.autograd.Function):
    """Its tensors are what it goes back to: x, y where nobody runs its layer's node, log_var or its row's handle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _y: Tensor | None, _log_var: Tensor | None, rest: Rest) -> Tensor:
        y, log_var, key, plan, own, into = rest
        plane, out = torch.empty_like(plan.energy), torch.empty_like(y)
        if plan.joined is not None:
            plan.joined(x, y, log_var, key, out, plane)
        elif plan.filtered is not None:
            energy, plane = plane, torch.empty_like(plan.plane)
            in_turn(plan.sums.total, (x, energy), plan.filtered, (y, energy, log_var, key, out, plane))
        else:
            plan.sums.total(x, plane)
            if plan.extra:
                plane += plan.extra
            if plan.pool:
                plane = torch._C._nn.avg_pool2d(plane, *plan.pool)
            plan.noises.add(y, plane, log_var, key, out)
        if ctx is not None:
            ctx.save_for_backward(x if own is not None or x.requires_grad else None, plane, log_var, key)
            ctx.plan, ctx.own, ctx.into = plan, own, into
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        # With gradients on, a second derivative is asked for; there is none, and the longer way says so.
        return _backward_once(ctx, grad) if torch.is_grad_enabled() else _backward(ctx, grad)


# Past Function's own apply: it asks for functorch, as `dispatch.quick` has.
_apply = super(torch.autograd.Function, _Noisy).apply
# And past that of its node, which looks for what is asked here: three calls of Python to one.
_Noisy._backward_cls.apply = _Noisy.backward  # type: ignore[attr-defined]


def _backward(ctx: Any, grad: Tensor) -> Any:
    x, plane, log_var, key = ctx.saved_tensors
    plan: Plan = ctx.plan
    if grad.stride() != plan.stride:  # once, for us and for the layer
        grad = torch.empty_strided(grad.shape, plan.stride, dtype=grad.dtype, device=grad.device).copy_(grad)
    if plan.pulls is not None:
        node, into, mine = ctx.own, ctx.into, None
        if node is not None:
            mine = own_gradient(node, grad, x, plan.last)
            if not torch._C._autograd._get_current_graph_task_keep_graph():
                ctx.own = None  # what it has saved goes, as autograd lets go of all others'
            if mine is None:  # this backward pass asks for nothing before this layer
                x = None
            elif mine.stride() != x.stride() or mine.dtype != grad.dtype:
                mine = torch.empty_like(x, dtype=grad.dtype).copy_(mine)
        grad_log_var = torch.empty_like(log_var) if into is None else into[0].of(into[1], ctx.next_functions[-1][0])
        grad_x = plan.pulls.of(grad, x, plane, log_var, key, mine, grad_log_var)
        return grad_x, grad if node is None else None, grad_log_var if into is None else None, None
    grad_plane, grad_log_var = plan.noises.gradients(grad, plane, log_var, key)
    if x is None:
        return None, grad, grad_log_var, None
    if plan.like is not None:
        grad_plane = torch.ops.aten.avg_pool2d_backward.default(grad_plane, plan.like, *plan.pool)
    elif plan.pool:  # its own transpose, by a call that takes less than half of the time
        grad_plane = torch._C._nn.avg_pool2d(grad_plane, *plan.pool)
    grad_x = torch.empty_like(x)
    plan.sums.gradient(x, grad_plane, grad_x)
    return grad_x, grad, grad_log_var, None


_backward_once = torch.autograd.function.once_differentiable(_backward)
