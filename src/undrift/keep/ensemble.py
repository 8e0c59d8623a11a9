"""Pull weights back towards the source after each step (ROID's weight ensembling)."""

import torch

from undrift._errors import OptionError
from undrift._types import Keeper
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.state import named_learnables, named_sources


class Ensemble(Keeper):
    """After each step θ = ensemble · θ + (1 − ensemble) · θ_source, for all that is trained but log-variances.

    Args:
        ensemble: share of the adapted value that is kept; ROID's is 0.99.
    """

    divisible = True  # it looks at weights alone, which are the same in all processes

    def __init__(self, ensemble: float = 0.99) -> None:
        if not 0 <= ensemble <= 1:
            raise OptionError(f"ensemble={ensemble!r} is not in [0, 1]. ROID's is 0.99; 1 never goes back.")
        self.ensemble = ensemble

    def __repr__(self) -> str:
        return f"Ensemble(ensemble={self.ensemble})"

    @torch.no_grad()
    def after(self, model: Perturbed, loss: float) -> None:  # noqa: ARG002
        """Draw the network back towards its source."""
        sources = named_sources(model)
        for name, parameter in named_learnables(model).items():
            parameter.lerp_(sources[name].to(parameter), 1 - self.ensemble)
