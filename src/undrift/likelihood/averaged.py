"""Average all trained values over time: the teacher of methods that follow their own past."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from undrift.answer.forward import forward
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.state import extra_pass, named_learnables, weights_moved
from undrift.system.interrupts import surely

_TEACHER = "teacher."


class Average:
    """Weights that follow the network's: average ← kept · average + (1 − kept) · network, after each step.

    It starts as the network itself, at the first batch.
    """

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}

    def start(self, model: Perturbed) -> None:
        """Copy the network's weights, once."""
        if not self.weights:
            self.weights = {name: p.detach().clone() for name, p in named_learnables(model).items()}

    @torch.no_grad()
    def follow(self, model: Perturbed, kept: float) -> None:
        """Move towards the network."""
        for name, parameter in named_learnables(model).items():
            self.weights[name].lerp_(parameter, 1 - kept)

    @torch.no_grad()
    def logits(self, model: Perturbed, images: Tensor) -> Tensor:
        """Return the logits of the mean network with the averaged weights, normalised as in a step."""
        return with_weights(model, self.weights, images)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the averaged weights, by names that begin with "teacher."."""
        return {_TEACHER + name: tensor for name, tensor in self.weights.items()}

    def load_state_dict(self, state: Mapping[str, object], model: Perturbed) -> None:
        """Go on from a state; without weights in it, start from the network."""
        trained = named_learnables(model).items()
        self.weights = {n: t.to(p) for n, p in trained if isinstance(t := state.get(_TEACHER + n), Tensor)}

    @contextmanager
    def deployed(self, model: Perturbed) -> Iterator[Perturbed]:
        """Give the model with the averaged weights in it, for the length of a `with` block."""
        trained = {name: p for name, p in named_learnables(model).items() if name in self.weights}
        own = {name: p.detach().clone() for name, p in trained.items()}
        try:
            _put(trained, self.weights)
            yield model
        finally:
            surely(lambda: _put(trained, own))


def with_weights(model: Perturbed, weights: Mapping[str, Tensor], images: Tensor) -> Tensor:
    """Return the logits of the mean network with other weights, normalised as in a step."""
    with extra_pass(model, noisy=False):
        return forward(model, images, weights=weights)


@torch.no_grad()
def _put(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(values[name])
    weights_moved()
