"""Where noise comes from: normal numbers that are a function of a seed, a step, a call and a sample.

A `torch.Generator` cannot enter a compiled graph, and activation checkpointing does not replay one. So every number
here is computed from integers held in tensors (SplitMix64 and Box-Muller): the same key gives the same noise, on any
batch split, on any rank, and when a checkpointed part of the network runs a second time.
"""

import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # torch.compiler.disable would import all of Dynamo at once

from undrift._errors import UndriftError, UndriftWarning
from undrift.replay import Replay, in_backward

T = TypeVar("T")

# SplitMix64 (Steele, Lea, Flood 2014), as signed 64-bit integers.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX2 = 0x94D049BB133111EB - 2**64


def _shift(z: Tensor, bits: int) -> Tensor:
    # >> keeps the sign of an int64; SplitMix64 shifts zeros in.
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def mix(z: Tensor) -> Tensor:
    """Return SplitMix64's output for the state z: 64 well-mixed bits."""
    z = (z ^ _shift(z, 30)) * _MIX1
    z = (z ^ _shift(z, 27)) * _MIX2
    return z ^ _shift(z, 31)


def _fork(key: Tensor, number: int) -> Tensor:
    """Return the number-th key that follows from a key."""
    return mix(key + ((number * _GOLDEN + 2**63) % 2**64 - 2**63))  # Python's integers do not wrap by themselves


def normal(key: Tensor, shape: Sequence[int], first_row: int = 0) -> Tensor:
    """Return standard normal numbers (float32) of that shape, a function of key and of the row in the first dimension.

    Row i depends on `first_row + i` and on nothing else in the batch, so a batch may be split over processes.
    """
    rows, numbers = shape[0], math.prod(shape[1:])
    pairs = (numbers + 1) // 2
    row = torch.arange(first_row + 1, first_row + rows + 1, device=key.device)
    counter = torch.arange(1, pairs + 1, device=key.device)
    # SplitMix64's states, key·γ + n·γ. The key is added first: the compiler would take n·γ for an index and overflow.
    bits = mix((mix((key + row) * _GOLDEN)[:, None] + counter) * _GOLDEN)
    # Box-Muller on the two halves; + 0.5 keeps the logarithm finite.
    radius = torch.sqrt(-2 * torch.log((_shift(bits, 32).float() + 0.5) * 2**-32))
    angle = (bits & 0xFFFFFFFF).float() * (2 * math.pi * 2**-32)
    both = torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)], dim=1)
    return both[:, :numbers].reshape(tuple(shape))


def rank() -> int:
    """Return this process's rank, 0 where nothing is distributed."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return 0


_idents = itertools.count()
_traced: dict[int, int] = {}


def count_traced(ident: int, start: bool = False) -> int:
    """Return the number of this call in the graph being traced; the compiler runs it while tracing, once a call."""
    _traced[ident] = 0 if start else _traced.get(ident, 0) + 1
    return _traced[ident]


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
        self.calls = 0
        self.traced = False  # a graph that holds the whole forward pass is being captured
        self.stale = False  # a traced forward pass has moved the step
        self.current = self.step
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
        self.calls = 0
        self.current = mix(self.seed)

    # Hooks of the root ------------------------------------------------------------------------------------------

    def begin(self, _net: nn.Module, _args: Any, _kwargs: Any) -> None:
        """Open a step: noise from here on differs from all before."""
        if not self.enabled:
            return
        if torch.compiler.is_compiling():
            self.step.add_(1)
            self.traced = count_traced(self.ident, start=True) == 0
            self.stale = True
        else:
            self._begin()

    def end(self, _net: nn.Module, _args: Any, _kwargs: Any, _output: Any) -> None:
        """Close the step; after the first, name the layers that the forward pass never called."""
        self.traced = False
        if not torch.compiler.is_compiling():
            self.replay.recording = False
            if self.noisy and self.waiting:
                self._warn_waiting()

    @_disable_dynamo
    def _begin(self) -> None:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise UndriftError(
                "a perturbed network was called inside torch.func or vmap, which cannot hold its step and statistics. "
                "Call it directly, or use the source network: with model.off()."
            )
        self.traced = False
        self.replay.open()
        if not in_backward():
            self.step.add_(1)
            self.calls, self.stale = 0, False
            self.current = mix(self.seed + self.step * _GOLDEN)
        # A checkpoint around the whole network calls its root again in the backward pass.
        self.current = self.replay.once(lambda: self.current)

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

    def next(self, number: int) -> Tensor:
        """Return a key that no other call of this step gets (local noise: each use of a layer is independent)."""
        return self.once(self._fresh, number)

    def of(self, number: int) -> Tensor:
        """Return the key of one weight in this step (a drawn weight is the same in each use)."""
        return self.once(lambda: _fork(self._now(), 2 * number + 1), number)

    def once(self, make: Callable[[], T], number: int | None = None) -> T:
        """Return make(), or what it gave in the forward pass when activation checkpointing runs that part again.

        `number` is that of the weight that asks, so that one which never asks can be named.
        """
        # Inside one graph the recomputed part reads the same tensors; only there is a ticket not needed.
        return make() if self._in_graph() else self._replay(make, number)

    def mode(self) -> tuple[bool, bool]:
        """Return whether noise is on and whether statistics move, as it was when this part of the network first ran.

        By the time a checkpointed part runs again, `mean()` and `rest()` are over.
        """
        return self.once(lambda: (self.noisy, self.training))

    def _in_graph(self) -> bool:
        return torch.compiler.is_compiling() and self.traced

    def _now(self) -> Tensor:
        if self._in_graph():
            return mix(self.seed + self.step * _GOLDEN)
        if self.stale:
            # This part runs outside the graph that opened the step; its calls are numbered apart from the graph's.
            self.current, self.calls, self.stale = mix(self.seed + self.step * _GOLDEN), 1 << 20, False
        return self.current

    def _fresh(self) -> Tensor:
        if self._in_graph():
            # A checkpointed part of a graph may not change Python state, so calls are counted while it is traced.
            return _fork(self._now(), 2 * count_traced(self.ident))
        now = self._now()
        self.calls += 1
        return _fork(now, 2 * self.calls)

    @_disable_dynamo
    def _replay(self, make: Callable[[], T], number: int | None) -> T:
        if self.waiting and number is not None:
            self.waiting.pop(number, None)
        return self.replay.once(make)

    def __getstate__(self) -> dict[str, Any]:
        # A copy made inside mean() is a perturbed network all the same.
        return {**self.__dict__, "noisy": True, "current": self.current.detach().clone()}
