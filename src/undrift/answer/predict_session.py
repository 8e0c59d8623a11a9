"""Run a network for one call of `predict`: draws, views, eval mode, and noise that continues from batch to batch."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from undrift._errors import OptionError
from undrift.answer.views import AUTO, ReversibleView, chosen, combined
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


def checked_samples(model: nn.Module, samples: int | None) -> int:
    """Return how many draws to average: those given, or the model's own; a plain network has none."""
    if samples is not None and (isinstance(samples, bool) or not isinstance(samples, int) or samples < 0):
        raise OptionError(
            f"samples={samples!r} is not a whole number from 0 up. 0 is the mean network, 10 the paper's."
        )
    if not isinstance(model, Perturbed):
        return 0
    return model.options.test_samples if samples is None else samples


def views_asked(model: nn.Module, names: str | Sequence[str] | None, own: bool = True) -> list[ReversibleView]:
    """Return the views of an image to ask, none where that is the image alone.

    Args:
        names: the views given; None takes the model's own where `own` allows it.
    """
    if names is None:
        names = model.options.answer_views if isinstance(model, Perturbed) and own else ()
        names = () if names == (AUTO,) else names
    names = chosen(names)
    return combined(names) if names else []
