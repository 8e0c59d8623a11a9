"""Record the noise and modes of each call in a forward pass, and replay them under activation checkpointing.

A checkpointed part of a network runs a second time in the backward pass, and must draw the noise, use the statistics
and be in the mode of its first run. A checkpoint restores torch's global generator before that second run. So a ticket
drawn from that generator names the call: the second run draws the same ticket.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from undrift._errors import UndriftError
from undrift.system.private import (
    dispatch_modes,
    graph_task,
    in_backward,
    next_node_number,
    running_node_number,
    saving_hooks,
    without_dispatch_modes,
)

T = TypeVar("T")
_KEPT = 64
Ticket = tuple[int, int | None]  # a number from the generator, and who asked


class Replay:
    """The tickets of the latest forward passes."""

    def __init__(self) -> None:
        self.recording = False
        # By the number of the first autograd node that the forward pass could make.
        self.forwards: OrderedDict[int, dict[Ticket, Any]] = OrderedDict()

    def open(self) -> None:
        """Start the table of a forward pass, unless a checkpoint around the whole network runs it again."""
        self.recording = torch.is_grad_enabled()
        if self.recording and not in_backward():
            self._table()

    def once(self, make: Callable[[], T], who: int | None = None) -> T:
        """Return make(), or what it gave when this part of the network first ran; `who` asks."""
        if self.runs_once():
            return make()
        ticket = _ticket()
        if torch.is_grad_enabled() and in_backward():
            return self._find((ticket, who))
        value = make()
        table = next(reversed(self.forwards.values())) if self.forwards else self._table()
        table[ticket, who] = value
        return value

    def runs_once(self) -> bool:
        """Return whether this part of the network runs for the first and only time.

        A checkpoint hooks itself to what its part saves, or (reentrant) runs it without gradients inside a pass that
        has them. Nothing else runs again, and nothing else needs a ticket. (A part of a reentrant checkpoint that turns
        gradients on looks like nothing else, and meets an error in the backward pass.)
        """
        if not torch.is_grad_enabled():
            return not self.recording
        return graph_task() == -1 and saving_hooks(True) is None

    def _table(self) -> dict[Ticket, Any]:
        table = self.forwards[next_node_number()] = {}
        while len(self.forwards) > _KEPT:
            self.forwards.popitem(last=False)
        return table

    def _find(self, ticket: Ticket) -> Any:
        # Two passes that started from one state of the generator have the same tickets; the node that asks for its
        # inputs was made by one of them, and nodes are numbered.
        number = running_node_number()
        found = [(first, table) for first, table in reversed(self.forwards.items()) if ticket in table]
        for first, table in found:
            if number is None or first <= number:
                return table[ticket]
        if found:
            return found[0][1][ticket]
        raise UndriftError(
            "a part of the network ran again in the backward pass, and its first run's noise is not known. Activation "
            "checkpointing needs preserve_rng_state=True, use_reentrant=False around a whole network, and at most "
            f"{_KEPT} forward passes before a backward pass; change the call of torch.utils.checkpoint."
        )

    def __getstate__(self) -> dict[str, Any]:
        # Tickets belong to a backward pass under way; a copy has none.
        return {"recording": False, "forwards": OrderedDict()}


_own = threading.local()


def _ticket() -> int:
    """Return a number from torch's global generator, in the CPU's memory whatever the default device is."""
    if not dispatch_modes():
        return _drawn()
    with without_dispatch_modes():  # a number for Python: a fake one has no value, and a recording has no use for it
        return _drawn()


def _drawn() -> int:
    slot: Tensor | None = getattr(_own, "slot", None)
    if slot is None:
        with torch.inference_mode(False):
            slot = _own.slot = torch.empty((), dtype=torch.int64, device="cpu")
    return int(slot.random_().item())
