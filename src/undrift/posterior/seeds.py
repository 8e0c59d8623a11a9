"""Where noise comes from: normal numbers that are a function of a seed, a step, a call and a sample.

A `torch.Generator` cannot enter a compiled graph, and activation checkpointing does not replay one. So every number
is computed from integers held in tensors: SplitMix64 makes a key of them here, and `undrift.kernels` makes noise of the
key. The same key gives the same noise, on any batch split, on any rank, and when a checkpointed part of the network
runs a second time.
"""

import itertools
import operator
import warnings
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # torch.compiler.disable would import all of Dynamo at once

from undrift._errors import UndriftError, UndriftWarning
from undrift.kernels import dispatch
from undrift.kernels.epsilon import normal
from undrift.kernels.triton import native
from undrift.posterior.forward_pass import Pass
from undrift.posterior.log_var_row import Row, Rows
from undrift.posterior.replay import Replay, in_backward

__all__ = ["Key", "count_traced", "keys_of", "mix", "normal", "rank"]

T = TypeVar("T")

# SplitMix64 (Steele, Lea, Flood 2014), as signed 64-bit integers.
GOLDEN = 0x9E3779B97F4A7C15 - 2**64
MIX1 = 0xBF58476D1CE4E5B9 - 2**64
MIX2 = 0x94D049BB133111EB - 2**64
USES = 8  # of a weight in one step, that a compiled graph has a key ready for


def _shift(z: Tensor, bits: int) -> Tensor:
    # >> keeps the sign of an int64; SplitMix64 shifts zeros in.
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def mix(z: Tensor) -> Tensor:
    """Return SplitMix64's output for the state z: 64 well-mixed bits."""
    z = (z ^ _shift(z, 30)) * MIX1
    z = (z ^ _shift(z, 27)) * MIX2
    return z ^ _shift(z, 31)


def keys_of(seed: Tensor, step: Tensor, count: int) -> Tensor:
    """Return the first keys of a step: SplitMix64's own stream, 2^20 keys a step."""
    # The step is added before the product: the compiler would take arange·γ for an index, and an index does not wrap.
    return mix(seed + (torch.arange(count, device=step.device) + step * (1 << 20)) * GOLDEN)


def _wrap(number: int) -> int:
    """Return the number as a signed 64-bit integer: Python's do not wrap by themselves."""
    return (number + 2**63) % 2**64 - 2**63


def rank() -> int:
    """Return this process's rank, 0 where nothing is distributed."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return 0


# Tells whether the compiler is watching; where PyTorch has no such function, it may be.
_callback: Callable[[], Any] = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", bool)

_idents = itertools.count()
_traced: dict[int, dict[int, int]] = {}


def count_traced(ident: int, number: int | None = None) -> int:
    """Return how often a weight was used before in the graph being traced; without a number, start such a graph.

    The compiler runs it while tracing, once a call.
    """
    if number is None:
        _traced[ident] = {}
        return 0
    uses = _traced.setdefault(ident, {})
    uses[number] = uses.get(number, -1) + 1
    return uses[number]


# What of a pass no copy has.
_UNDER_WAY = {"graph": None, "handles": None, "offered": None, "apart": None, "ready": None, "last": None}


class Key(nn.Module):
    """The state all noise of one network shares: seed, step, call; and whether noise is on at all.

    `begin` and `end` are hooks on the network's root: each forward pass is one step. `train()` and `eval()` of the
    perturbed network arrive here too, and decide whether moving statistics move.
    """

    seed: Tensor
    step: Tensor

    def __init__(self, device: torch.device, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.register_buffer("seed", torch.zeros((), dtype=torch.int64, device=device))
        self.register_buffer("step", torch.zeros((), dtype=torch.int64, device=device))
        self.ident = next(_idents)
        self.enabled = True  # the perturbation as a whole
        self.noisy = True  # its noise; the mean network has norm policies, but no noise
        self.weights = 0  # how many there are: weight k gets the keys 2k (local noise) and 2k + 1 (a drawn weight)
        self.calls: dict[int, int] = {}  # how often each weight was used in this step
        self.traced = False  # a graph that holds the whole forward pass is being captured
        self.stale = False  # a traced forward pass has moved the step
        self.current: Tensor | None = None  # the step's keys of all weights: one computation for all layers
        self.apart: tuple[Tensor, tuple[Tensor, ...]] | None = None  # those keys, and each of them
        self.ready: Pass | None = None  # while one is under way in which nothing has to be looked up
        self.graph: Tensor | None = None  # the same inside a graph that is being captured, a row for each use
        self.handles: tuple[Tensor, ...] | None = None  # in a graph that holds the KL: `fused.share`
        self.offered: tuple[Tensor, ...] | None = None  # those of the pass that begins next
        self.rows: Rows | None = None  # where log-variances come from; a `Perturbed` has them
        self.last: weakref.ref[Pass] | None = None  # the last pass with a row of them, as long as its graph is there
        self.waiting: dict[int, str] = {}  # the weights whose hook has not fired yet, by number
        self.replay = Replay()
        self.reseed(generator)

    def reseed(self, generator: torch.Generator | int | None = None) -> None:
        """Start the noise anew from a generator, from a number, or from torch's global generator."""
        if isinstance(generator, int):
            generator = torch.Generator().manual_seed(generator)
        device = generator.device if generator is not None else None
        self.seed.copy_(torch.randint(-(2**63), 2**63 - 1, (), generator=generator, device=device))
        self.step.zero_()
        self.calls, self.current, self.ready = {}, None, None

    def enlist(self, number: int) -> None:
        """Count a weight in: its keys are made with those of all others."""
        self.weights = max(self.weights, number + 1)
        self.current, self.ready = None, None

    # Hooks of the root ------------------------------------------------------------------------------------------

    def begin(self, _net: nn.Module, _args: Any, _kwargs: Any) -> None:
        """Open a step: noise from here on differs from all before."""
        if not self.enabled:
            return
        if torch.compiler.is_compiling():
            from undrift.posterior import keys_operator

            self.step.add_(1)
            # index: PyTorch 2.6 makes a symbol of a module's number that differs from one network to the next, and what
            # is run while tracing takes no symbol.
            self.traced = count_traced(operator.index(self.ident)) == 0
            # Without noise no keys: an exported mean network is PyTorch's operators alone.
            self.graph = keys_operator.keys(self.seed, self.step, 2 * self.weights, USES) if self.noisy else None
            self.stale = True
            self.handles, self.offered = self.offered, None  # what a pass that raised has left is nobody's
        else:
            self._begin()

    def end(self, _net: nn.Module, _args: Any, _kwargs: Any, _output: Any) -> None:
        """Close the step; after the first, name the layers that the forward pass never called."""
        self.traced = False
        if torch.compiler.is_compiling():
            self.graph = self.handles = None  # a graph's tensors stay inside it
        else:
            self.replay.recording = False
            vars(self)["ready"] = None
            if self.noisy and self.waiting:
                self._warn_waiting()

    @_disable_dynamo
    def _begin(self) -> None:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise UndriftError(
                "a perturbed network was called inside torch.func or vmap, which cannot hold its step and statistics. "
                "Call it directly, or use the source network: with model.off()."
            )
        own = vars(self)  # past Module's own setter, which takes its time
        own.update(traced=False, ready=None, handles=None, offered=None)
        self.replay.open()
        if not in_backward():
            self.step.add_(1)
            # The mean network asks for no key.
            own.update(calls={}, current=self._keys() if self.noisy else None, stale=False)
            if native.pending and dispatch.quick(self.seed, self.step):
                native.look()
            if self.current is not None and not self.waiting and self.replay.idle() and _callback() is None:
                ready = own["ready"] = Pass(self._each(self.current), self.calls, rank(), self._row())
                own["last"] = None if ready.row is None else weakref.ref(ready)
                return
        # A checkpoint around the whole network calls its root again in the backward pass.
        own["current"] = self.replay.once(lambda: self.current)

    def _warn_waiting(self) -> None:
        names = list(self.waiting.values())
        self.waiting = {}
        warnings.warn(
            f"the forward pass never called {', '.join(names)}: perturbed, but without effect. If the network uses "
            f"their weights in another way, the noise is missing there; leave them out: exclude={tuple(names)!r}.",
            UndriftWarning,
            stacklevel=2,
        )

    # What layers ask for -----------------------------------------------------------------------------------------

    def next(self, number: int) -> Tensor | None:
        """Return a key that no other call of this step gets (local noise: each use of a layer is independent).

        None where noise is off. One question, asked once: a layer has little time to spare.
        """
        if not torch.compiler.is_compiling():
            ready = self.ready
            if not self.noisy:
                if _callback() is None and self.replay.idle():
                    self.waiting.pop(number, None)
                    return None
            elif ready is not None and not self.stale and number not in self.calls and ready.goes_on():
                self.calls[number] = 0
                return ready.keys[2 * number]
        return self.once(lambda: self._fresh(number) if self.noisy else None, number)

    def of(self, number: int) -> Tensor | None:
        """Return the key of one weight in this step (a drawn weight is the same in each use), or None: noise is off."""
        return self.once(lambda: self._now()[2 * number + 1] if self.noisy else None, number)

    def once(self, make: Callable[[], T], number: int | None = None) -> T:
        """Return make(), or what it gave in the forward pass when activation checkpointing runs that part again.

        `number` is that of the weight that asks, so that one which never asks can be named.
        """
        if not torch.compiler.is_compiling() and _callback() is None:  # hiding from the compiler takes its time
            return self._ask(make, number)
        # Inside one graph the recomputed part reads the same tensors; only there is a ticket not needed.
        return make() if self._in_graph() else self._replay(make, number)

    def _in_graph(self) -> bool:
        return torch.compiler.is_compiling() and self.traced

    def _keys(self) -> Tensor:
        """Return the keys of the step that `step` stands at: 2k and 2k + 1 are weight k's."""
        count = 2 * self.weights
        if count and not torch.compiler.is_compiling() and dispatch.quick(self.seed, self.step):
            from undrift.kernels.triton import launch

            return launch.keys(self.seed, self.step, count)  # one launch for sixteen
        return keys_of(self.seed, self.step, count)

    def _row(self) -> Row | None:
        """Return the log-variances as one row, where the noise of a pass that begins now is made by kernels."""
        if self.rows is None or not torch.is_grad_enabled() or not dispatch.quick(self.seed, self.step):
            return None
        return self.rows.next()

    def _now(self) -> Tensor:
        if self._in_graph():
            assert self.graph is not None
            return self.graph[0]
        if self.stale:
            # This part runs outside the graph that opened the step; its uses are numbered apart from the graph's.
            self.calls, self.current, self.stale = dict.fromkeys(range(self.weights), 1 << 20), None, False
        if self.current is None:
            self.current = self._keys()
        return self.current

    def _fresh(self, number: int) -> Tensor:
        if self._in_graph():
            return self._traced(number)
        now = self._now()
        return self._counted(now[2 * number], number) if torch.compiler.is_compiling() else self._used(now, number)

    def _traced(self, number: int) -> Tensor:
        # A checkpointed part of a graph may not change Python state, so uses are counted while it is traced. A count is
        # a place in a table: no sum, which would be a kernel a layer, and for the first uses no branch on it. The
        # compiler may trace a part twice, and wants to see the same.
        assert self.graph is not None
        use = count_traced(operator.index(self.ident), operator.index(number))
        if use < USES:
            return self.graph[use, 2 * number]
        return self.graph[0, 2 * number] + _wrap(use * GOLDEN)

    def _used(self, now: Tensor, number: int) -> Tensor:
        return self._counted(self._each(now)[2 * number], number)

    def _each(self, now: Tensor) -> tuple[Tensor, ...]:
        # All keys as tensors at once: taking them one by one is a call of PyTorch's for each layer.
        if self.apart is None or self.apart[0] is not now:
            object.__setattr__(self, "apart", (now, now.unbind()))  # nn.Module's own looks for parameters first
            assert self.apart is not None
        return self.apart[1]

    def _counted(self, key: Tensor, number: int) -> Tensor:
        use = self.calls.get(number, -1) + 1
        self.calls[number] = use
        return key + _wrap(use * GOLDEN) if use else key

    @_disable_dynamo
    def _replay(self, make: Callable[[], T], number: int | None) -> T:
        return self._ask(make, number)

    def _ask(self, make: Callable[[], T], number: int | None) -> T:
        if self.waiting and number is not None:
            self.waiting.pop(number, None)
        return self.replay.once(make, number)

    def __getstate__(self) -> dict[str, Any]:
        # A copy made inside mean() is a perturbed network all the same.
        return {**self.__dict__, "noisy": True, "calls": {**self.calls}, **_UNDER_WAY}
