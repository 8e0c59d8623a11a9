"""Restore the source's weights if the loss falls so far that it indicates a collapse (SAR's recovery)."""

import math
from typing import Any

import torch

from undrift._errors import OptionError
from undrift._types import Keeper
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.state import named_learnables, named_sources


class Recovery(Keeper):
    """Restore the source's weights when the running mean e of the loss falls below a threshold.

        e = rate · e + (1 − rate) · loss     (starts at the first loss; in a climb the second pass counts)

    As in the authors' code the threshold is not scaled by ln C. The optimiser's momentum survives. Then e starts again,
    as in the benchmark's code; SAR's own keeps the old e, and so restores the source after every step until e has
    risen.

    Args:
        recover_below: the threshold.
        recovery_rate: share of e that is kept.
    """

    def __init__(self, recover_below: float = 0.2, recovery_rate: float = 0.9) -> None:
        if not math.isfinite(recover_below) or not 0 <= recovery_rate < 1:
            raise OptionError(
                f"recover_below={recover_below!r}, recovery_rate={recovery_rate!r}: needed are a number, and one in "
                "[0, 1). SAR's are 0.2 and 0.9; recover_below=0 never recovers."
            )
        self.recover_below, self.recovery_rate = recover_below, recovery_rate
        self.mean: float | None = None

    def __repr__(self) -> str:
        return f"Recovery(recover_below={self.recover_below}, recovery_rate={self.recovery_rate})"

    @torch.no_grad()
    def after(self, model: Perturbed, loss: float) -> str | None:
        """Follow the loss; restore the source if it has fallen too far."""
        if not math.isfinite(loss):
            return None
        rate = self.recovery_rate
        self.mean = loss if self.mean is None else rate * self.mean + (1 - rate) * loss
        if self.mean >= self.recover_below:
            return None
        self.mean = None
        sources = named_sources(model)
        for name, parameter in named_learnables(model).items():
            parameter.copy_(sources[name])
        return f"recovered, mean loss below {self.recover_below}"

    def reset(self) -> None:
        """Forget e."""
        self.mean = None

    def state_dict(self) -> dict[str, Any]:
        """Return e."""
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.mean = state["mean"]
