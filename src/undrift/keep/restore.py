"""Reset random single weights to the source's after each step (CoTTA's stochastic restoration)."""

from statistics import NormalDist
from typing import Any

import torch

from undrift._errors import OptionError
from undrift._types import Keeper
from undrift.kernels import normal
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.state import named_learnables, named_sources
from undrift.system.randomness import draw_keys, own_generator


class Restore(Keeper):
    """After each step set every trained number back to the source's with probability `restore`.

    Args:
        restore: that probability; CoTTA's is 0.01 on CIFAR, 0.001 on ImageNet.
        seed: of the choice; without it torch's global generator gives one.
    """

    def __init__(self, restore: float = 0.01, seed: int | None = None) -> None:
        if not 0 <= restore < 1:
            raise OptionError(f"restore={restore!r} is not in [0, 1). CoTTA's is 0.01, 0.001 on ImageNet.")
        self.restore = restore
        self._generator = own_generator(seed)
        self._first = self._generator.get_state()

    def __repr__(self) -> str:
        return f"Restore(restore={self.restore})"

    @torch.no_grad()
    def after(self, model: Perturbed, loss: float) -> None:  # noqa: ARG002
        """Restore some numbers."""
        if self.restore == 0:
            return
        sources, trained = named_sources(model), named_learnables(model)
        below = NormalDist().inv_cdf(self.restore)  # a standard normal number is below
        keys = draw_keys(self._generator, len(trained), model.key.step.device)
        for key, (name, parameter) in zip(keys, trained.items(), strict=True):
            chosen = normal(key.to(parameter.device), (1, parameter.numel())).view(parameter.shape) < below
            parameter.copy_(torch.where(chosen, sources[name].to(parameter), parameter))

    def reset(self) -> None:
        """Start the random choice again."""
        self._generator.set_state(self._first)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the random choice, and where it began."""
        return {"generator": self._generator.get_state(), "first": self._first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self._generator.set_state(state["generator"].cpu())
        self._first = state["first"].cpu()
