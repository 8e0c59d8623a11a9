"""All that a perturbation attaches to a network and detaches again: hooks, copies of norm state and weights, flags.

The user's own tensors are never changed: while the network is perturbed, modules hold copies, and the originals wait in
`Swapped`; `off()` and `remove()` put them and the `SourceState` back. The network holds a reference to its `Attached`,
so that `undrift.remove` works even if the `Perturbed` is gone.
"""

import math
import weakref
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from undrift.posterior.seeds import Key
from undrift.system.interrupts import uninterrupted
from undrift.system.private import write_count
from undrift.system.warning import warn


class SourceState:
    """A source network's flags, requires_grad and buffers: `restore` puts them in force, `leave` hands over."""

    def __init__(self, net: nn.Module) -> None:
        self.net, modules = net, list(net.modules())
        self._flags = [(m, m.training) for m in modules]
        self._left: list[bool] | None = None  # the flags of the perturbed network while it is off
        self._grads = [(p, p.requires_grad) for p in net.parameters()]
        self._names = [name for name, _ in net.named_parameters()]
        self._written: list[float] = []  # `_write_counts` at the last `restore`
        self._warned = False
        self._buffers = [(m, n, b.detach().clone()) for m in modules for n, b in m._buffers.items() if b is not None]
        # It packs padded batches before it checks for hooks, and hooked layers cannot take packed ones.
        encoders = [m for m in modules if isinstance(m, nn.TransformerEncoder)]
        self._packing = [m for m in encoders if getattr(m, "use_nested_tensor", False)]

    def restore(self) -> None:
        """Give the network its flags, its requires_grad and its buffers back, bit for bit."""
        self._left = [m.training for m, _ in self._flags]
        for module, flag in self._flags:
            module.training = flag
        for parameter, flag in self._grads:
            parameter.requires_grad_(flag)
        self._restore_buffers()
        self._written = self._write_counts()

    def leave(self) -> None:
        """Freeze the weights, and undo what forward passes in train mode did to the source's buffers."""
        self._restore_buffers()
        for parameter, _ in self._grads:
            parameter.requires_grad_(False)
        for (module, _), flag in zip(self._flags, self._left or [f for _, f in self._flags], strict=True):
            module.training = flag

    def pack_padding(self, packing: bool) -> None:
        """Let the network's transformer encoders pack padded batches, or not."""
        for encoder in self._packing:
            encoder.use_nested_tensor = packing

    def warn_of_changes(self) -> None:
        """Warn, once, if a weight was written to or replaced since `restore`.

        Only a warning, because the same values may have been written (an average that is tried and taken back), and
        some layers write in a forward pass (an embedding with `max_norm`). Moves to another device or dtype do not
        count; writes past autograd (`weight.data.copy_`) are not seen.
        """
        counts = zip(self._names, self._written, self._write_counts(), strict=True)
        changed = [name for name, before, now in counts if now > before]
        if not changed or self._warned:
            return
        self._warned = True
        few = ", ".join(changed[:3]) + (", …" if len(changed) > 3 else "")
        warn(
            f"{len(changed)} weights of the source network ({few}) were written to or replaced inside `with "
            "model.off():`; needed: unchanged weights, because σ, the prior and the norm statistics belong to them. "
            "For other weights: net = model.remove(), load them, undrift.perturb(net)."
        )

    def _write_counts(self) -> list[float]:
        """Return how often each weight was written to; infinity for one that is gone."""
        there = {id(p) for p in self.net.parameters()}
        return [write_count(p) if id(p) in there else math.inf for p, _ in self._grads]

    @torch.no_grad()
    def _restore_buffers(self) -> None:
        for module, name, value in self._buffers:
            now: Tensor | None = module._buffers.get(name)
            if now is None or now.shape != value.shape:
                module._buffers[name] = value.clone()
            elif not torch.equal(now, value.to(now)):
                now.copy_(value)


class Swapped:
    """The two sets of tensors of one module; `away` is the one not in it now.

    Attributes:
        name: of the module in the network.
        layer: the module.
        learned: whether the copies of its parameters are trained.
    """

    hears_of_errors = True  # its hooks run behind a pass that raised, too: what the pass put in may not stay

    def __init__(self, name: str, layer: nn.Module, learned: bool) -> None:
        self.name, self.layer, self.learned = name, layer, learned
        self.away: dict[str, Tensor | None] = {}

    def copy(self, copies: dict[int, Tensor]) -> None:
        """Make copies of the module's tensors to adapt; `copies` keeps tied parameters tied."""
        for name, tensor in self.tensors().items():
            if tensor is not None and id(tensor) not in copies:
                fresh = tensor.detach().clone()
                copies[id(tensor)] = nn.Parameter(fresh, self.learned) if isinstance(tensor, nn.Parameter) else fresh
            self.away[name] = None if tensor is None else copies[id(tensor)]

    def exchange(self) -> None:
        """Exchange the module's tensors and those kept here."""
        for name, tensor in self.tensors().items():
            other = self.away[name]
            if other is not None and tensor is not None:
                # model.to(…) moved only what was in the module; the others follow now.
                other.data = other.data.to(tensor.device, tensor.dtype)
            self.away[name] = tensor
            # Directly into the dictionaries, so that the order of names stays.
            table: dict[str, Any] = self.layer._parameters if name in self.layer._parameters else self.layer._buffers
            table[name] = other

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters in the module now."""
        return [p for p in self.layer._parameters.values() if p is not None]

    def tensors(self) -> dict[str, Tensor | None]:
        """Return all tensors to exchange, by name in the module."""
        return {**self.layer._parameters, **self.layer._buffers}


class Trained(Swapped):
    """The weights of one module that a scheme trains (option `train`), all but those named in `without`."""

    def __init__(self, name: str, layer: nn.Module, without: Container[str] = ()) -> None:
        super().__init__(name, layer, learned=True)
        self._without = without

    def tensors(self) -> dict[str, Tensor | None]:
        """Return the module's own parameters; buffers other than norm statistics stay the source's."""
        return {name: p for name, p in self.layer._parameters.items() if name not in self._without}


Hook = Callable[..., Any]
Hooks = list[tuple[nn.Module, Hook]]

_NAME = "_undrift"  # under which the network's root has it, as long as the hooks are on


class Attached:
    """The hooks and exchanged tensors of one perturbed network.

    Attributes:
        before: hooks before a module's forward pass; `after`: behind it.
        swapped: lists of what changes places with the source's tensors.
        aside: the `with model.off():` blocks that are open, in whatever order they end.
        removed: whether it is off for good.
        on: whether its tensors and hooks are in the network now.
    """

    def __init__(
        self, net: nn.Module, key: Key, before: Hooks, after: Hooks, swapped: Sequence[Sequence[Swapped]]
    ) -> None:
        self.net, self.key, self.before, self.after, self.swapped = net, key, before, after, swapped
        self.removed = self.on = False
        self.aside: list[object] = []
        self._source = SourceState(net)
        self._handles: list[RemovableHandle] = []

    def attach(self) -> None:
        """Freeze the weights, put the adapted norm state in, hook everything up."""
        self._source.leave()
        self.enter()
        vars(root_of(self.net))[_NAME] = self
        _live.add(self)

    def enter(self) -> None:
        """Put the adapted tensors in and hook everything up: the quick half of `attach`, which looks at no flags."""
        self.key.enabled = self.on = True
        self._source.pack_padding(False)
        for held in self._held():
            held.exchange()
        # Noise belongs to a layer's own output, so it comes before any hook of the user's; a norm policy looks at the
        # input that the layer will get, so it comes after. The order is the same after every off().
        for module, hook in self.before:
            self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        for module, hook in reversed(self.after):
            # A norm policy has to hear of a pass that raised (a checkpoint ends its second run so): the layer then
            # holds statistics that must not stay.
            always = getattr(getattr(hook, "__self__", None), "hears_of_errors", False)
            self._handles.append(module.register_forward_hook(hook, prepend=True, with_kwargs=True, always_call=always))
            # What was put first is first for iterators alone: a compiler that counts a dictionary's entries (PyTorch
            # 2.11) takes a user's hook for ours. Filled anew, both orders are one.
            hooks = module._forward_hooks
            in_order = list(hooks.items())
            hooks.clear()
            hooks.update(in_order)

    def detach(self) -> None:
        """Undo `attach`. Hooks go too: some modules (nn.TransformerEncoderLayer) compute differently with hooks on."""
        self.exit()
        self._source.restore()
        vars(root_of(self.net)).pop(_NAME, None)

    def park(self) -> None:
        """Detach, and leave the network to others: `enter` and `exit` alone put this on and take it off from now on."""
        with uninterrupted():
            self.detach()
            _live.discard(self)

    def exit(self) -> None:
        """Undo `enter`; a second time changes nothing."""
        if not self.on:
            return
        self.key.enabled = self.on = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for held in self._held():
            held.exchange()
        self._source.pack_padding(True)

    def leave(self, block: object) -> None:
        """Step aside for a block: Ctrl-C comes before that or after it."""
        with uninterrupted():
            self.aside.append(block)
            if len(self.aside) == 1 and not self.removed:
                self.detach()

    def warn_of_changes(self) -> None:
        """Warn where the source network was not left as it was given, while this was aside."""
        if not self.removed:
            self._source.warn_of_changes()

    def come_back(self, block: object) -> None:
        """Undo what `leave` did for a block; nothing where it did nothing yet, or that is undone."""
        with uninterrupted():
            if block in self.aside:
                self.aside.remove(block)
                if not self.aside and not self.removed:
                    self.attach()

    def remove(self) -> None:
        """Go for good; a second time changes nothing."""
        with uninterrupted():
            if not self.removed:
                self.removed = True
                if not self.aside:
                    self.detach()

    def _held(self) -> list[Swapped]:
        return [held for part in self.swapped for held in part]


_live: "weakref.WeakSet[Attached]" = weakref.WeakSet()


def root_of(net: nn.Module) -> nn.Module:
    """Return the module that is called: a compiled network calls its original."""
    root: nn.Module = getattr(net, "_orig_mod", net)
    return root


def attached_to(net: nn.Module) -> list[Attached]:
    """Return every perturbation that a module of the network belongs to, also one that is off."""
    own = {id(module) for module in net.modules()}
    found = [a for a in _live if not a.removed and own & {id(module) for module in a.net.modules()}]
    # A copy of a perturbed network was never made by us; it carries a copy of what is on it.
    found += [a for module in net.modules() if (a := vars(module).get(_NAME)) is not None]
    return list({id(a): a for a in found}.values())
