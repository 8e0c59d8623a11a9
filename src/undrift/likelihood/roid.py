"""ROID: weighted likelihood ratio, consistency with a second view, prior correction (Marsden et al. 2024)."""

import math
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from undrift._errors import OptionError
from undrift._types import Step
from undrift.likelihood.augment import Augment
from undrift.likelihood.entropy import entropies, symmetric_cross_entropies
from undrift.posterior.norm import Norm
from undrift.posterior.perturbed import Perturbed
from undrift.system.private import BatchNorm

if TYPE_CHECKING:
    from undrift.images.preprocess import Preprocess

PACE = 0.1  # weight of the new batch in the running mean prediction
CLIP, EPSILON = 0.99, 1e-5
CORRECTIONS = ("scaled", "authors")


class Roid:
    """Likelihood ratio and consistency, weighted towards images that are certain and unlike the mean prediction m.

        d_i = 1 − cos(p_i, m),  c_i = −H(p_i),  each scaled to [0, 1] over the batch;  w_i = exp(sharpness · d_i c_i)
        Σ_{d_i ≥ mean d} w_i (SLR(p_i) + consistency · SCE(p_i, q_i)) / batch
        SLR(p) = −Σ_c p ln(p / (1 − p) + 1e-5), p at most 0.99;  SCE = −½ Σ_c (p ln q + q ln p)

    q is the prediction for a second view of the kept images alone, so norm layers with batch statistics use those of
    the view. Gradients go through p and q, not through w. The view is augmented (colour, affine, flip), or seen through
    a draw of the perturbation, or both. If one image of several is kept and norm layers use batch statistics, the
    consistency term is left out. m starts uniform and becomes 0.9 m + 0.1 · mean p of the batch after each step.

    The answer is the logits from before the step, times q = (p̄ + s) / (1 + sC), s = max(1/B, 1/C) / max p̄, p̄ the
    batch's mean prediction. "scaled" divides q by its mean over classes, which changes no label and keeps the scale of
    the logits. "authors" does not: with ten classes its logits are a tenth as large, and probabilities nearly uniform.
    If all d, or all c, of a batch are equal, they are scaled to 0 (the authors divide 0 by 0).

    Args:
        consistency: factor before SCE; 0 leaves the second pass out.
        augmented: whether the second view is augmented.
        noisy: whether the second view passes through a fresh draw; otherwise through the mean network.
        sharpness: 3, one over ROID's temperature.
        batch: what the sum is divided by. None is the number of images at hand. The authors' code uses the configured
            batch size, which differs if images were skipped and in a smaller last batch.
        correct_prior: how the answer is corrected: "scaled" (True is the same), "authors", or False for not at all.
        preprocess: see `Augment`.
        seed: of the views; without it torch's global generator gives one.

    Attributes:
        mean: m; None is uniform.
    """

    def __init__(
        self,
        consistency: float = 1.0,
        *,
        augmented: bool = True,
        noisy: bool = False,
        sharpness: float = 3.0,
        batch: int | None = None,
        correct_prior: Literal["scaled", "authors"] | bool = "scaled",
        preprocess: "Preprocess | None" = None,
        seed: int | None = None,
    ) -> None:
        if not 0 <= consistency < float("inf") or not math.isfinite(sharpness) or (batch is not None and batch < 1):
            raise OptionError(
                f"consistency={consistency!r}, sharpness={sharpness!r}, batch={batch!r}: needed are a number from 0 "
                "up, a number, and a whole number from 1 up or None. ROID's are 1, 3 and the stream's batch."
            )
        if correct_prior not in (*CORRECTIONS, True, False):
            raise OptionError(
                f"correct_prior={correct_prior!r}: needed is one of {', '.join(CORRECTIONS)}, True or False. "
                'Labels are the same under both; "scaled" has probabilities that mean something.'
            )
        self.consistency, self.augmented, self.noisy, self.sharpness = consistency, augmented, noisy, sharpness
        self.batch, self.correct_prior = batch, "scaled" if correct_prior is True else correct_prior
        self.augment = Augment(blur=False, noise=0.0, outside="reflection", preprocess=preprocess, seed=seed)
        self.mean: Tensor | None = None
        self._next: Tensor | None = None

    def __call__(self, logits: Tensor, step: Step) -> Tensor:
        """Return the loss of one batch."""
        probs = logits.detach().softmax(dim=1)
        mean = torch.full_like(probs[0], 1 / probs.shape[1]) if self.mean is None else self.mean.to(probs)
        weights, kept = weigh(logits.detach(), mean, self.sharpness)
        self._next = torch.lerp(mean, probs.mean(dim=0), PACE)
        weights, logits = weights[kept], logits[kept]
        loss = (weights * likelihood_ratios(logits)).sum()
        if self.consistency and (other := self._other(step, kept)) is not None:
            loss = loss + self.consistency * (weights * symmetric_cross_entropies(logits, other)).sum()
        return loss / (self.batch or len(probs))

    def _other(self, step: Step, kept: Tensor) -> Tensor | None:
        """Return the second view's logits, or None if it cannot be made."""
        view = step.images[kept]
        if len(view) == 1 < len(step.images) and any(map(by_the_batch, step.model.norms)):
            # The statistics of one image do not stand for its batch, and behind a pooling one value per channel has no
            # variance: the stream would stop with an error. In a batch of one image the logits were made the same way.
            return None
        if self.augmented:
            view = self.augment(view, step.model.preprocess)
        return step.drawn_logits(view) if self.noisy else step.mean_logits(view)

    def answer(self, logits: Tensor) -> Tensor:
        """Return the logits under the corrected prior."""
        if self.correct_prior is False:
            return logits
        prior = corrected_prior(logits)
        return logits * (prior if self.correct_prior == "authors" else prior / prior.mean())

    def follow(self, model: Perturbed) -> None:  # noqa: ARG002
        """Move m, as the step was made."""
        if self._next is not None:
            self.mean, self._next = self._next, None

    def state_dict(self) -> dict[str, Any]:
        """Return m and the state of the random views."""
        return {"mean": self.mean, **self.augment.state_dict()}

    def load_state_dict(self, state: dict[str, Any], model: Perturbed) -> None:  # noqa: ARG002
        """Go on from a state."""
        self.mean, self._next = state["mean"], None
        self.augment.load_state_dict(state)

    def __repr__(self) -> str:
        names = ("consistency", "augmented", "noisy", "sharpness", "batch", "correct_prior")
        return "Roid(" + ", ".join(f"{name}={getattr(self, name)!r}" for name in names) + ")"


def weigh(logits: Tensor, mean: Tensor, sharpness: float) -> tuple[Tensor, Tensor]:
    """Return the weight of each image, and whether it is kept (see `Roid`)."""
    diverse = _scaled(1 - F.cosine_similarity(logits.softmax(dim=1), mean[None], dim=1))
    certain = _scaled(-entropies(logits))
    # "Not below" rather than "at least": NaN stays in, and the loop sees it in the loss.
    return (sharpness * diverse * certain).exp(), ~(diverse < diverse.mean())


def likelihood_ratios(logits: Tensor) -> Tensor:
    """Return −Σ_c p ln(p / (1 − p) + 1e-5) of each image, p at most 0.99."""
    probs = logits.softmax(dim=1).clamp(max=CLIP)
    return -(probs * (probs / (1 - probs) + EPSILON).log()).sum(dim=1)


def corrected_prior(logits: Tensor) -> Tensor:
    """Return (p̄ + s) / (1 + sC) for each class: the batch's mean prediction, smoothed."""
    images, classes = logits.shape
    mean = logits.softmax(dim=1).mean(dim=0)
    smooth = max(1 / images, 1 / classes) / mean.max()
    return (mean + smooth) / (1 + smooth * classes)


def by_the_batch(policy: Norm) -> bool:
    """Return whether some norm layer uses batch statistics in a step."""
    keeps_none = policy.statistics is None and isinstance(policy.layer, BatchNorm)
    return keeps_none or policy.statistics in ("batch", "train")


def _scaled(values: Tensor) -> Tensor:
    low, high = values.aminmax()
    return torch.where(high > low, (values - low) / (high - low), (values - low) * 0)
