"""All that a perturbation attaches to a network and detaches again: hooks, copies of norm state and weights, flags.

The network holds a reference to it, so that `undrift.remove` works even if the `Perturbed` is gone.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from undrift.posterior.seeds import Key
from undrift.posterior.source_state import SourceState
from undrift.posterior.swap import Swapped
from undrift.system.interrupts import uninterrupted

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
