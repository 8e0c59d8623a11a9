"""Turns at a network for one call of `predict`: eval mode, and noise that continues from turn to turn."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from undrift.posterior.layers import evaluating
from undrift.posterior.model_lock import turn
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.state import keeping_noise, keeping_step

T = TypeVar("T")


class Turns:
    """Gives a call the network in eval mode, with noise of its own, once per batch.

    Between two turns the network is as it was: the loader runs its own code then, and may ask the same network, or wait
    for a thread that does.
    """

    def __init__(self, model: nn.Module, generator: torch.Generator | int | None, samples: int) -> None:
        self.model, self.generator, self.samples = model, generator, samples
        self._noise: tuple[Tensor, Tensor] | None = None  # seed and step after the last turn

    def each(self, batches: Iterable[Tensor], given: object, ask: Callable[[Tensor], T]) -> Iterator[T]:
        """Yield what `ask` finds for each batch.

        Args:
            given: what the caller has. Of one tensor all parts get one turn: no code but ours runs between them.
        """
        if isinstance(given, Tensor | Mapping):
            with self._turn(last=True):
                found = [ask(batch) for batch in batches]
            yield from found
            return
        for batch in batches:
            with self._turn(last=False):
                one = ask(batch)
            yield one

    @contextmanager
    def _turn(self, last: bool) -> Iterator[None]:
        """Give the network for the length of a `with` block; of the last turn of a call nothing is remembered."""
        model = self.model
        with turn(model), evaluating(model), ExitStack() as stack:
            if not isinstance(model, Perturbed):
                yield
                return
            key = model.key
            if self.generator is not None:
                stack.enter_context(keeping_noise(key))
                if self._noise is None:
                    model.reseed(self.generator)
                else:
                    key.seed.copy_(self._noise[0])
                    key.step.copy_(self._noise[1])
            elif self.samples == 0:
                stack.enter_context(keeping_step(key))
            yield
            if self.generator is not None and not last:
                self._noise = key.seed.clone(), key.step.clone()
