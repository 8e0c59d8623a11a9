"""A layer as it was met last, so that its next pass need not find all that out again.

Between two launches of a layer a GPU waits for Python, and most of what Python asks has the answer it had a pass ago.
So a layer's noise keeps one such answer, and asks whether it still holds: of the tensors by one call into PyTorch, of
the layer by one for all of its settings. Whatever has changed is looked up again, the longer way.
"""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from undrift._pass import Pass
from undrift.fused.dispatch import _forced
from undrift.fused.layer import Plan, _apply, _Noisy
from undrift.fused.own import alone, own_of

# What `layer.plan_of` looks at; of a class, too: a lazy layer changes its own.
_LINEAR = attrgetter("__class__", "in_features")
_CONVOLUTION = attrgetter(
    "__class__", "kernel_size", "stride", "padding", "dilation", "padding_mode", "groups", "in_channels"
)
_guards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)


class Known:
    """How a layer's tensors got their noise by one node of autograd.

    Args:
        layer: the layer, whose forward hook is a method of `noise`.
        x, y: its input and output; plain tensors where `dispatch.quick` says so.
        plan: of them.
        now: the pass that they belong to.
        alike: whether three tensors are like x, y and the log-variances.
    """

    __slots__ = ("alike", "device", "forced", "layer", "noise", "owns", "plan", "rank", "settings", "settings_of")

    def __init__(
        self, layer: nn.Module, noise: Any, x: Tensor, plan: Plan, now: Pass, alike: Callable[..., bool]
    ) -> None:
        self.layer, self.noise, self.plan, self.alike = layer, noise, plan, alike
        self.device, self.rank, self.forced = x.get_device(), now.rank, _forced[-1]
        self.owns = plan.pulls is not None and x.requires_grad
        self.settings_of = _LINEAR if isinstance(layer, nn.Linear) else _CONVOLUTION
        self.settings: tuple[Any, ...] = self.settings_of(layer)

    def add(self, now: Pass, number: int, x: Tensor, y: Tensor) -> Tensor | None:
        """Return y with its noise, None where something is not as it was: nothing has been done then."""
        layer, log_var = self.layer, self.noise._parameters["log_var"]
        if (
            not self.alike(x, y, log_var)
            or number in now.calls
            or not now.goes_on()
            or self.device != now.device
            or self.rank != now.rank
            or self.forced != _forced[-1]
            or torch._C._len_torch_dispatch_stack() > 0
            or torch._C._functorch.peek_interpreter_stack() is not None
            or self.settings != self.settings_of(layer)
        ):
            return None
        now.calls[number] = 0
        key, plan = now.keys[2 * number], self.plan
        if not now.graded:
            return _Noisy.forward(None, x, None, log_var, (y, key, plan, None))
        own = own_of(y) if self.owns and alone(layer, self.noise) else None
        out: Tensor = _apply(x, y if own is None else None, log_var, (y, key, plan, own))  # type: ignore[no-untyped-call]
        return out


def likeness(*tensors: Tensor) -> Callable[..., bool] | None:
    """Return what tells whether tensors are like these; None where this PyTorch has none.

    It is what guards compiled code: of each tensor it compares class, sizes, strides, dtype, device, whether it wants a
    gradient here and now, and by which keys PyTorch dispatches it: what a transform has wrapped has others.
    """
    if _guards is None:
        return None
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    try:
        found: Callable[..., bool] = _guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    except (TypeError, ValueError, RuntimeError, SystemError):
        return None  # of some other PyTorch
    return found
