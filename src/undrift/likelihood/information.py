"""Information maximisation: predictions that are certain for each image and diverse over the batch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from undrift._errors import OptionError
from undrift._types import Step
from undrift.posterior.outputs import rows


class Information:
    """Mean entropy minus the entropy of the mean prediction (SHOT's first two terms).

        mean_i H(p_i) − H(p̄),   H(p) = −Σ_c p_c log(p_c + ε),   p̄ = mean_i p_i

    The second term favours equally frequent classes. For others give their frequencies π; the loss becomes

        mean_i H(p_i) + KL(p̄ ‖ π),   KL(p̄ ‖ π) = Σ_c p̄_c [log(p̄_c + ε) − log(π_c + ε)]

    With uniform π the two differ by the constant log C.

    Args:
        class_prior: how frequent the classes are, as fractions or counts; None if all are equal.
        epsilon: SHOT's constant under the logarithms.

    Examples:
        >>> certain = torch.tensor([[20.0, 0.0], [0.0, 20.0]])  # certain, and one image of each class
        >>> round(float(Information()(certain)), 3)  # −log 2
        -0.693
    """

    recordable = True
    per_position = True
    divisible = True

    def __init__(self, class_prior: Sequence[float] | Tensor | None = None, epsilon: float = 1e-5) -> None:
        if not 0 <= epsilon < 1:
            raise OptionError(f"epsilon={epsilon!r} is not in [0, 1). SHOT's is 1e-5.")
        self.epsilon = epsilon
        self.class_prior = None if class_prior is None else _normalised(class_prior)

    def __call__(self, logits: Tensor, step: Step | None = None) -> Tensor:  # noqa: ARG002
        """Return the loss of one batch."""
        probs = rows(logits).softmax(dim=1)
        return self._entropy(probs).mean() + self.imbalance(probs.mean(dim=0))

    def imbalance(self, mean: Tensor) -> Tensor:
        """Return the diversity term of a mean prediction: −H(p̄), or KL(p̄ ‖ π)."""
        if self.class_prior is None:
            return -self._entropy(mean)
        if len(self.class_prior) != len(mean):
            raise OptionError(
                f"class_prior has {len(self.class_prior)} classes, the network {len(mean)}. "
                "Give one frequency for each of the network's classes, in its order."
            )
        if self.class_prior.device != mean.device:
            self.class_prior = self.class_prior.to(mean.device)  # once, as a copy to the device waits
        return -self._entropy(mean) - (mean * (self.class_prior.to(mean) + self.epsilon).log()).sum()

    def _entropy(self, probs: Tensor) -> Tensor:
        # ε = 0 is allowed, and 0 · log 0 is 0.
        return -(probs * (probs + self.epsilon).clamp_min(torch.finfo(probs.dtype).tiny).log()).sum(dim=-1)

    def __repr__(self) -> str:
        prior = None if self.class_prior is None else [round(float(p), 4) for p in self.class_prior]
        return f"Information(class_prior={prior}, epsilon={self.epsilon})"


def _normalised(class_prior: Sequence[float] | Tensor) -> Tensor:
    prior = torch.as_tensor(class_prior, dtype=torch.float32).detach()
    if prior.ndim != 1 or len(prior) < 2 or not torch.isfinite(prior).all() or (prior < 0).any() or prior.sum() == 0:
        raise OptionError(
            f"class_prior={class_prior!r} is not a list of frequencies, one per class, none negative, some positive. "
            "Give fractions or counts of the classes expected in the target."
        )
    return prior / prior.sum()
