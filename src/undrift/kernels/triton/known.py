"""A layer as it was met last, so that its next pass need not find all that out again.

Between two launches of a layer a GPU waits for Python, and most of what Python asks has the answer it had a pass ago.
So a layer's noise keeps one such answer, and asks whether it still holds: of the tensors by one call into PyTorch, of
the layer by one for all of its settings. Whatever has changed is looked up again, the longer way.
"""

from functools import partial
from operator import attrgetter
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks

from undrift.kernels.dispatch import _forced
from undrift.kernels.triton import native
from undrift.kernels.triton.layer import Plan, _apply, _Noisy
from undrift.kernels.triton.own import alone, own_of
from undrift.posterior.forward_pass import Pass
from undrift.posterior.tensor_guard import likeness

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
        centred: positions that the input has its mean taken off over, before the energy sees it.
        copied: whether the input is copied before.

    Attributes:
        add: what adds noise to an output, given pass, layer, noise, x and y; it returns None where something is not as
            it was, and has done nothing then. Without Python, where that can be (`native`). None: it is to be looked up
            each time, as PyTorch has no guards, or Python would have to prepare the input.
    """

    __slots__ = ("add", "alike", "device", "forced", "layer", "names", "number", "owns", "plan", "rank", "settings")

    add: Any

    def __init__(
        self,
        layer: nn.Module,
        number: int,
        x: Tensor,
        y: Tensor,
        log_var: Tensor,
        plan: Plan,
        now: Pass,
        centred: tuple[int, ...] = (),
        copied: bool = False,
    ) -> None:
        self.layer, self.number, self.plan = ref(layer), number, plan
        self.device, self.rank, self.forced = x.get_device(), now.rank, _forced[-1]
        self.owns = plan.pulls is not None and x.requires_grad
        self.names = _LINEAR if isinstance(layer, nn.Linear) else _CONVOLUTION
        self.settings: tuple[Any, ...] = _settings[self.names](layer)
        self.alike = likeness(x, y, log_var)
        self.add = None if self.alike is None or centred or copied else self._add
        made = plan.native()
        if made is not None:
            rest = (layer, self.names, _forced, _global_forward_hooks, alone, centred, copied)
            met = native.module.met(made, number, now.rank, x, y, log_var, self.owns, *rest)
            self.add = partial(native.module.again, met)

    def _add(self, now: Pass, layer: nn.Module, noise: nn.Module, x: Tensor, y: Tensor) -> Tensor | None:
        number, plan = self.number, self.plan
        assert self.alike is not None, "else it has nothing to add"
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
