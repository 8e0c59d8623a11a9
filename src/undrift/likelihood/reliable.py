"""Entropy of reliable images only: the loss of EATA and SAR."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from undrift._errors import OptionError
from undrift._types import Step
from undrift.likelihood.entropy import entropies
from undrift.posterior.perturbed import Perturbed

PACE = 0.1  # weight of the new batch in the running mean prediction


class ReliableEntropy:
    """Mean entropy of images that are reliable (entropy below E₀ = margin · ln C) and say something new.

        mean_{i kept} w_i H(p_i),   kept: H(p_i) < E₀ and |cos(p_i, m)| < redundancy,   w_i = exp(E₀ − H(p_i))

    m is the running mean prediction: the mean of the first reliable images, which are all kept, then 0.9 m + 0.1 · mean
    of the kept p. It moves after each step. Weights carry no gradient. If nothing is kept, no step is made; so it is in
    EATA's code, while SAR's steps on a loss of NaN.

    In the second pass of a climb (SAR) only images that the first pass kept count, if they are still reliable.

    Args:
        margin: E₀ over ln C, the largest entropy.
        redundancy: largest |cos(p, m)| of an image that is kept; None keeps all that are reliable (SAR).
        weighted: whether surer images count more (EATA) or all count alike (SAR).

    Attributes:
        mean: m; None before the first reliable image.
    """

    def __init__(self, margin: float = 0.4, redundancy: float | None = 0.4, weighted: bool = True) -> None:
        if not 0 < margin < float("inf") or (redundancy is not None and not 0 < redundancy <= 1):
            raise OptionError(
                f"margin={margin!r}, redundancy={redundancy!r}: they lie above 0, the second up to 1 or is None. "
                "EATA's are 0.4 and 0.4 (CIFAR-10), 0.1 (CIFAR-100), 0.05 (ImageNet)."
            )
        self.margin, self.redundancy, self.weighted = margin, redundancy, weighted
        self.mean: Tensor | None = None
        self._next: Tensor | None = None
        self._kept: Tensor | None = None  # those of the first pass

    def __call__(self, logits: Tensor, step: Step) -> Tensor | None:
        """Return the loss of one batch, or None where no image is kept."""
        most = self.margin * math.log(logits.shape[1])
        entropy = entropies(logits)
        kept = self._choose(logits.detach(), entropy.detach() < most, step.climbed)
        count = kept.sum()
        if not bool(count):
            # A loss that is not finite is the loop's to report; comparisons with NaN keep nothing.
            return None if bool(torch.isfinite(entropy).all()) else entropy.mean()
        weights = kept.to(entropy)
        if self.weighted:
            weights = weights * (most - entropy.detach()).exp()
        # where: an image that is left out may be infinite, and 0 · ∞ is not 0.
        return torch.where(kept, weights * entropy, torch.zeros_like(entropy)).sum() / count

    def _choose(self, logits: Tensor, reliable: Tensor, climbed: bool) -> Tensor:
        """Return which images are kept; the first pass of a step also computes the next m."""
        if climbed:
            assert self._kept is not None, "a climb starts from a first pass"
            return self._kept & reliable
        self._kept, self._next = reliable, None
        if self.redundancy is None:
            return reliable
        probs = logits.softmax(dim=1)
        mean = None if self.mean is None else self.mean.to(probs)
        if mean is not None:
            self._kept = reliable & (F.cosine_similarity(probs, mean[None], dim=1).abs() < self.redundancy)
        chosen = probs[self._kept]
        if len(chosen):
            found = chosen.mean(dim=0)
            self._next = found if mean is None else torch.lerp(mean, found, PACE)
        return self._kept

    def follow(self, model: Perturbed) -> None:  # noqa: ARG002
        """Move m, as the step was made."""
        if self._next is not None:
            self.mean, self._next = self._next, None

    def state_dict(self) -> dict[str, Any]:
        """Return m. A reset forgets it (EATA's authors keep it; the benchmark's code forgets it)."""
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, Any], model: Perturbed) -> None:  # noqa: ARG002
        """Go on from a state."""
        self.mean, self._next, self._kept = state["mean"], None, None

    def __repr__(self) -> str:
        return f"ReliableEntropy(margin={self.margin}, redundancy={self.redundancy}, weighted={self.weighted})"
