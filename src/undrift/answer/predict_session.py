"""Run a network for one call of `predict`: eval mode, and noise that continues from batch to batch."""

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


class PredictSession:
    """Gives a call the network in eval mode, with its own noise, once per batch.

    Between two turns the network is as it was, because the loader's code runs then: it may use the same network, or
    wait for a thread that does.
    """

    def __init__(self, model: nn.Module, generator: torch.Generator | int | None, samples: int) -> None:
        self.model, self.generator, self.samples = model, generator, samples
        self._noise: tuple[Tensor, Tensor] | None = None  # seed and step after the last turn

    def each(self, batches: Iterable[Tensor], given: object, ask: Callable[[Tensor], T]) -> Iterator[T]:
        """Yield what `ask` finds for each batch.

        Args:
            given: what the caller has. The parts of one tensor share a turn, as no foreign code runs between them.
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
        """Give the network for a `with` block; remember where the noise stands unless it is the last turn."""
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
