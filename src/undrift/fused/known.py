"""A layer as it was met last, so that its next pass need not find all that out again.

Between two launches of a layer a GPU waits for Python, and most of what Python asks has the answer it had a pass ago.
So a layer's noise keeps one such answer, and asks whether it still holds: of the tensors by one call into PyTorch, of
the layer by one for all of its settings. Whatever has changed is looked up again, the longer way.
"""

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks

from undrift._pass import Pass
from undrift.fused import native
from undrift.fused.dispatch import _forced
from undrift.fused.layer import Plan, _apply, _Noisy
from undrift.fused.own import alone, own_of

# What `layer.plan_of` looks at; of a class, too: a lazy layer changes its own.
_LINEAR = ("in_features",)
_CONVOLUTION = ("kernel_size", "stride", "padding", "dilation", "padding_mode", "groups", "in_channels")
_settings = {names: attrgetter("__class__", *names) for names in (_LINEAR, _CONVOLUTION)}


class Known:
    """How a layer's tensors got their noise by one node of autograd.

    Args:
        layer: the layer, and the number of its weight.
        x: its input; a plain tensor where `dispatch.quick` says so.
        y: its output.
        log_var: its log-variances.
        plan: of all three.
        now: the pass that they belong to.
        alike: whether three tensors are like x, y and the log-variances.

    Attributes:
        add: what adds noise to an output, given pass, layer, noise, x and y; it returns None where something is not as
            it was, and has done nothing then. Without Python, where that can be (`native`).
    """

    __slots__ = ("add", "alike", "device", "forced", "layer", "names", "number", "owns", "plan", "rank", "settings")

    add: Callable[[Pass, nn.Module, nn.Module, Tensor, Tensor], Tensor | None]

    def __init__(
        self,
        layer: nn.Module,
        number: int,
        x: Tensor,
        y: Tensor,
        log_var: Tensor,
        plan: Plan,
        now: Pass,
        alike: Callable[..., bool],
    ) -> None:
        self.layer, self.number, self.plan, self.alike = ref(layer), number, plan, alike
        self.device, self.rank, self.forced = x.get_device(), now.rank, _forced[-1]
        self.owns = plan.pulls is not None and x.requires_grad
        self.names = _LINEAR if isinstance(layer, nn.Linear) else _CONVOLUTION
        self.settings: tuple[Any, ...] = _settings[self.names](layer)
        made = plan.native()
        if made is None:
            self.add = self._add
        else:
            rest = (layer, self.names, _forced, _global_forward_hooks, alone)
            met = native.module.met(made, number, now.rank, x, y, log_var, self.owns, *rest)
            self.add = partial(native.module.again, met)

    def _add(self, now: Pass, layer: nn.Module, noise: nn.Module, x: Tensor, y: Tensor) -> Tensor | None:
        number, plan = self.number, self.plan
        log_var: Any = noise._parameters.get("log_var")
        if (
            log_var is None  # a parametrization makes it
            or not self.alike(x, y, log_var)
            or number in now.calls
            or not now.goes_on()
            or self.device != now.device
            or self.rank != now.rank
            or self.forced != _forced[-1]
            or torch._C._len_torch_dispatch_stack() > 0
            or torch._C._functorch.peek_interpreter_stack() is not None
            or self.settings != _settings[self.names](layer)
            or plan.native() is not None  # since a moment ago: met again, the layer is known without Python
        ):
            return None
        now.calls[number] = 0
        key, row = now.keys[2 * number], now.row
        if not now.graded:
            return _Noisy.forward(None, x, None, None, (y, log_var, key, plan, None, None))
        own = own_of(y) if self.owns and alone(layer, noise) else None
        edge, into = log_var, None
        if row is not None and plan.pulls is not None and row.log_vars[number] is log_var:
            # And the pass: as long as it may be differentiated, the KL asks for its row.
            edge, into = row.handle, (row.gradients, number, now)
        rest = (y, log_var, key, plan, own, into)
        out: Tensor = _apply(x, y if own is None else None, edge, rest)  # type: ignore[no-untyped-call]
        return out
