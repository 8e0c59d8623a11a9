"""Consistency between the mean network and a draw of the posterior."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from undrift._errors import OptionError
from undrift._types import Refreshing, Step
from undrift.likelihood.entropy import symmetric_cross_entropies
from undrift.likelihood.wrap import as_likelihood, one_number
from undrift.posterior.perturbed import Perturbed


class Consistency:
    """Symmetric cross-entropy between a draw q and the mean network p, with gradients through both, plus a base.

        base + weight · mean_i −½ Σ_c (p_ic log q_ic + q_ic log p_ic)

    The draw takes the place of an augmented view. In online measurements this is the first likelihood for which the
    noise pays; it needs a σ that is not negligible. The mean network sees the batch in a second forward pass and
    normalises it by the batch's statistics. With norm_statistics="moving" or "domain" it uses the kept ones, which come
    from noisy draws and do not fit it.

    Args:
        weight: factor before the consistency.
        base: another likelihood to add, such as `undrift.entropy`.

    Examples:
        >>> import torch
        >>> z = torch.tensor([[2.0, 0.0]])
        >>> bool(symmetric_cross_entropies(z, z) < symmetric_cross_entropies(z, -z))
        True
    """

    def __init__(self, weight: float = 1.0, base: Callable[..., Any] | None = None) -> None:
        if not 0 <= weight < float("inf"):
            raise OptionError(f"weight={weight!r} is not a number from 0 up. 1 counts it as much as the base.")
        self.weight = weight
        self.base = None if base is None else as_likelihood(base)

    @property
    def per_position(self) -> bool:
        """Whether it takes a class per pixel: as the base does."""
        return self.base is None or getattr(self.base, "per_position", False)

    def __call__(self, logits: Tensor, step: Step) -> Tensor:
        """Return the loss of one batch."""
        loss = self.weight * symmetric_cross_entropies(logits, step.mean_logits()).mean()
        return loss if self.base is None else loss + one_number(self.base(logits, step))

    def refresh(self, model: Perturbed, batches: Callable[[], Iterator[tuple[Tensor, Tensor]]]) -> None:
        """Let the base look at the domain, if it has a `refresh`."""
        base: object = self.base
        if isinstance(base, Refreshing):
            base.refresh(model, batches)

    def state_dict(self) -> dict[str, Any]:
        """Return what the base needs to go on."""
        base: Any = self.base
        return base.state_dict() if hasattr(base, "state_dict") else {}

    def load_state_dict(self, state: dict[str, Any], model: Perturbed) -> None:
        """Let the base go on from a state; `model` is the network that was restored with it."""
        base: Any = self.base
        if hasattr(base, "load_state_dict"):
            base.load_state_dict(state, model)

    def __repr__(self) -> str:
        return f"Consistency(weight={self.weight}, base={self.base!r})"
