"""Draw noise as a function of a seed, a step, a call and a sample.

A `torch.Generator` cannot enter a compiled graph, and activation checkpointing does not replay one. So every number
is computed from integers held in tensors: `undrift.kernels` makes a key of seed and step, and noise of the key. The
same key gives the same noise, on any batch split, on any rank, and when a checkpointed part of the network runs again.
"""

import itertools
import operator
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from undrift import kernels
from undrift._errors import UndriftError
from undrift.kernels.epsilon import key_of_use
from undrift.system.private import (
    dispatch_modes,
    frame_watcher,
    graph_task,
    guard_module_hooks,
    hidden_from_compiler,
    in_backward,
    in_function_transform,
    next_node_number,
    running_node_number,
    saving_hooks,
    without_dispatch_modes,
)
from undrift.system.randomness import drawn_seed
from undrift.system.ranks import Share, divide, rank
from undrift.system.warning import warn

T = TypeVar("T")
USES = 8  # of a weight in one step, that a compiled graph has a key ready for
_KEPT = 64  # forward passes whose noise can be replayed
_idents = itertools.count()
_traced: dict[int, dict[int, int]] = {}


def count_traced(ident: int, number: int | None = None) -> int:
    """Count a weight's uses in the graph being traced, and return those before; without a number, start a graph.

    The compiler runs it while tracing, once a call.
    """
    if number is None:
        _traced[ident] = {}
        return 0
    uses = _traced.setdefault(ident, {})
    uses[number] = uses.get(number, -1) + 1
    return uses[number]


def prepare_compiler() -> None:
    """Make compiled networks look at hooks, and let `Key` count the uses of a weight while a graph is traced.

    This imports the compiler, which takes a second: the first call of a perturbed network and every optimiser import it
    as well.
    """
    torch.compiler.assume_constant_result(count_traced)
    guard_module_hooks()


class Key(nn.Module):
    """The state all noise of one network shares: seed, step, call; and whether noise is on at all.

    `begin` and `end` are hooks on the network's root: each forward pass is one step. `train()` and `eval()` of the
    perturbed network arrive here too, and decide whether moving statistics move.

    Attributes:
        seed, step: tensors, so that a compiled graph can read and move them.
        enabled: the perturbation as a whole.
        noisy: its noise; the mean network has norm policies, but no noise.
        weights: how many there are. Weight k gets the keys 2k (local noise) and 2k + 1 (a drawn weight).
        calls: how often each weight was used in this step.
        current: the step's keys, one computation for all layers.
        graph: the same inside a graph that is being traced, a row for each use.
        traced: a graph that holds the whole forward pass is being traced.
        stale: a compiled forward pass has moved the step.
        handles: where log-variances' gradients go in a graph that holds the KL (`kernels.share`).
        next_handles: those of the pass that begins next.
        parts: each log-variance as a part of the KL's row, in an uncompiled pass that shares it.
        next_parts: those of the pass that begins next.
        waiting: the weights whose hook has not fired yet, by number.
        share: how the rows of the batch that passes lie on several processes; None where this one has them all.
        rank: this process's, asked for once in a pass.
    """

    seed: Tensor
    step: Tensor

    def __init__(self, device: torch.device, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.register_buffer("seed", torch.zeros((), dtype=torch.int64, device=device))
        self.register_buffer("step", torch.zeros((), dtype=torch.int64, device=device))
        self.ident = next(_idents)
        self.enabled = True
        self.noisy = True
        self.weights = 0
        self.calls: dict[int, int] = {}
        self.current: tuple[Tensor, ...] | None = None
        self.graph: Tensor | None = None
        self.traced = False
        self.stale = False
        self.handles: tuple[Tensor, ...] | None = None
        self.next_handles: tuple[Tensor, ...] | None = None
        self.parts: tuple[Tensor, ...] | None = None
        self.next_parts: tuple[Tensor, ...] | None = None
        self.waiting: dict[int, str] = {}
        self.share: Share | None = None
        self.rank = 0
        self.replay = Replay()
        self.reseed(generator)

    def reseed(self, generator: torch.Generator | int | None = None) -> None:
        """Restart the noise from a generator, a number, or torch's global generator."""
        if isinstance(generator, int):
            generator = torch.Generator().manual_seed(generator)
        self.seed.copy_(drawn_seed(generator))
        self.step.zero_()
        self.calls, self.current = {}, None

    def add_weight(self, number: int) -> None:
        """Reserve the keys of a weight."""
        self.weights = max(self.weights, number + 1)
        self.current = None

    # Hooks of the root ------------------------------------------------------------------------------------------

    def begin(self, _net: nn.Module, _args: Any, _kwargs: Any) -> None:
        """Open a step: noise from here on differs from all before."""
        if not self.enabled:
            return
        if not torch.compiler.is_compiling():
            self._begin()
            return
        from undrift.kernels import operators

        self.step.add_(1)
        self.rank = rank()
        # index: PyTorch 2.6 makes a symbol of a module's number that differs from one network to the next, and what is
        # run while tracing takes no symbol.
        self.traced = count_traced(operator.index(self.ident)) == 0
        # Without noise no keys: an exported mean network is PyTorch's operators alone.
        self.graph = operators.keys(self.seed, self.step, 2 * self.weights, USES) if self.noisy else None
        self.stale = True
        self.handles, self.next_handles = self.next_handles, None  # what a pass that raised has left is nobody's
        self.parts = self.next_parts = None

    @hidden_from_compiler
    def _begin(self) -> None:
        if in_function_transform():
            raise UndriftError(
                "a perturbed network was called inside torch.func or vmap, which cannot hold its step and statistics. "
                "Call it directly, or use the source network: with model.off()."
            )
        again, self.rank = in_backward(), rank()  # a checkpoint around the whole network calls its root again
        self.traced, self.handles, self.next_handles = False, None, None
        self.parts, self.next_parts = self.next_parts, None
        self.replay.open(again)
        if not again:
            self.step.add_(1)
            self.calls, self.stale = {}, False
            self.current = self._keys() if self.noisy else None  # the mean network asks for no key
        if not self.replay.runs_once():
            self.current = self.replay.once(lambda: self.current)

    def end(self, _net: nn.Module, _args: Any, _kwargs: Any, _output: Any) -> None:
        """Close the step; after the first, name the layers that the forward pass never called."""
        self.traced = False
        if torch.compiler.is_compiling():
            self.graph = self.handles = None  # a graph's tensors stay inside it
        else:
            self.replay.recording, self.parts = False, None
            if self.noisy and self.waiting:
                self._warn_waiting()

    def _warn_waiting(self) -> None:
        names = list(self.waiting.values())
        self.waiting = {}
        warn(
            f"the forward pass never called {', '.join(names)}: perturbed, but without effect. If the network uses "
            f"their weights in another way, the noise is missing there; leave them out: exclude={tuple(names)!r}."
        )

    # Batches that lie on several processes ------------------------------------------------------------------------

    def first_row(self, rows: int) -> int:
        """Return where a layer's rows begin in the whole batch (an image may have several rows)."""
        if self.share is None:
            return self.rank * rows  # in a loop of the user's own, where processes have equal shares
        return self.share.first * (rows // self.share.own)

    def whole(self, rows: Tensor) -> Tensor:
        """Return the rows of the whole batch, given those of this process."""
        return rows if self.share is None else self.share.whole(rows)

    @contextmanager
    def dividing(self, batch: Tensor) -> Iterator[Tensor]:
        """Give this process its part of a batch that every process holds, for as long as it passes."""
        self.share, mine = divide(batch)
        try:
            yield mine
        finally:
            self.share = None

    # What layers ask for -----------------------------------------------------------------------------------------

    def next_key(self, number: int) -> Tensor | None:
        """Return a key that no other call of this step gets (local noise: each use of a layer is independent).

        None where noise is off.
        """
        watched = self.waiting or torch.compiler.is_compiling() or frame_watcher() is not None
        if not watched and self.replay.runs_once():  # as `once` finds out in more calls; a layer has little time
            return self._next(number) if self.noisy else None
        return self.once(lambda: self._next(number) if self.noisy else None, number)

    def weight_key(self, number: int) -> Tensor | None:
        """Return the key of one weight in this step (a drawn weight is the same in each use), or None: noise is off."""
        return self.once(lambda: self._now()[2 * number + 1] if self.noisy else None, number)

    def once(self, make: Callable[[], T], number: int | None = None) -> T:
        """Return make(), or what it gave in the forward pass when activation checkpointing runs that part again.

        `number` is that of the weight that asks, so that one which never asks can be named.
        """
        if not torch.compiler.is_compiling() and frame_watcher() is None:  # hiding from the compiler takes its time
            return self._replayed(make, number)
        # Inside one graph the recomputed part reads the same tensors; only there is a ticket not needed.
        return make() if self._in_graph() else self._hidden(make, number)

    def _replayed(self, make: Callable[[], T], number: int | None) -> T:
        if self.waiting and number is not None:
            self.waiting.pop(number, None)
        return self.replay.once(make, number)

    _hidden = hidden_from_compiler(_replayed)

    def _in_graph(self) -> bool:
        return torch.compiler.is_compiling() and self.traced

    def _next(self, number: int) -> Tensor:
        if self.traced and self._in_graph():
            return self._next_traced(number)
        now: Tensor | tuple[Tensor, ...] | None = self.current
        if now is None or self.stale:
            now = self._now()
        key, use = now[2 * number], self.calls.get(number, -1) + 1
        self.calls[number] = use
        return key_of_use(key, use) if use else key

    def _next_traced(self, number: int) -> Tensor:
        # A checkpointed part of a graph may not change Python state, so uses are counted while it is traced. A count is
        # a place in a table: no sum, which would be a kernel per layer, and for the first uses no branch on it. The
        # compiler may trace a part twice, and wants to see the same.
        assert self.graph is not None
        use = count_traced(operator.index(self.ident), operator.index(number))
        return self.graph[use, 2 * number] if use < USES else key_of_use(self.graph[0, 2 * number], use)

    def _now(self) -> Tensor | tuple[Tensor, ...]:
        """Return the keys of the step that `step` stands at: 2k and 2k + 1 are weight k's."""
        if self._in_graph():
            assert self.graph is not None
            return self.graph[0]
        if self.stale:
            # This part runs outside the graph that opened the step; its uses are numbered apart from the graph's.
            self.calls, self.current, self.stale = dict.fromkeys(range(self.weights), 1 << 20), None, False
        if self.current is None:
            self.current = self._keys()
        return self.current

    def _keys(self) -> tuple[Tensor, ...]:
        return kernels.keys(self.seed, self.step, 2 * self.weights).unbind()

    def __getstate__(self) -> dict[str, Any]:
        # A copy made inside mean() is a perturbed network all the same, and has no pass under way.
        of_a_pass = dict.fromkeys(("current", "graph", "handles", "next_handles", "parts", "next_parts", "share"))
        return {**self.__dict__, **of_a_pass, "noisy": True, "calls": {**self.calls}}


Ticket = tuple[int, int | None]  # a number from the generator, and who asked


class Replay:
    """What each call gave in the latest forward passes, for activation checkpointing to get it again.

    A checkpointed part of a network runs a second time in the backward pass, and must draw the noise, use the
    statistics and be in the mode of its first run. A checkpoint restores torch's global generator before that second
    run. So a ticket drawn from that generator names the call: the second run draws the same ticket.
    """

    def __init__(self) -> None:
        self.recording = False
        # By the number of the first autograd node that the forward pass could make.
        self.forwards: OrderedDict[int, dict[Ticket, Any]] = OrderedDict()

    def open(self, again: bool) -> None:
        """Start the table of a forward pass, unless a checkpoint around the whole network runs it `again`."""
        self.recording = torch.is_grad_enabled()
        if self.recording and not again:
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
    # A number for Python: a fake one has no value, and a recording has no use for it.
    with without_dispatch_modes() if dispatch_modes() else nullcontext():
        slot: Tensor | None = getattr(_own, "slot", None)
        if slot is None:
            with torch.inference_mode(False):
                slot = _own.slot = torch.empty((), dtype=torch.int64, device="cpu")
        return int(slot.random_().item())
