"""CoTTA: learn from a teacher that averages the network's past and, if unsure, many views (Wang et al. 2022)."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from undrift._errors import DataError, OptionError, OutputError
from undrift._types import Step
from undrift.answer.views import SAME, VIEWS, ReversibleView
from undrift.likelihood.augment import Augment
from undrift.likelihood.averaged import Average, with_weights
from undrift.likelihood.entropy import cross_entropies, symmetric_cross_entropies
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.state import named_sources

if TYPE_CHECKING:
    from undrift.images.preprocess import Preprocess


SIZES = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)


class Cotta:
    """Cross-entropy of the network to its teacher, an average over its own past.

        mean_i −Σ_c t_ic log p_ic     t the teacher's softmax, without gradient

    The anchor (the source's weights) decides for the whole batch: if its mean confidence is below the threshold, the
    teacher's logits are averaged over `views` augmented views; otherwise the teacher sees the plain images. All three
    are one network with the same norm policy and different weights. The answer is the teacher's logits that were the
    target. The teacher starts as a copy of the network and moves after each step, before any keeper:

        teacher = pace · teacher + (1 − pace) · network     for all that is trained

    Where the network answers each pixel, the views are the image at seven sizes, each as it is and mirrored, as its
    authors have it for segmentation; their answers come back to the pixels that they are about.

    After a stream the model holds the student, some of its weights just restored, although every answer was the
    teacher's. `deployed` puts the teacher in its place, to predict with it or to save it.

    Args:
        threshold: 0.92 on CIFAR-10, 0.72 on CIFAR-100, 0.1 on ImageNet.
        views: how many views are averaged, of images with one class.
        pace: share of the teacher that is kept in each step.
        symmetric: take the mean of both directions of the cross-entropy (ImageNet).
        preprocess: see `Augment`.
        seed: of the views; without it torch's global generator gives one.
    """

    per_position = True
    answers_alone = True  # whatever a pass says, the answer is the teacher's

    def __init__(
        self,
        threshold: float = 0.92,
        views: int = 32,
        *,
        pace: float = 0.999,
        symmetric: bool = False,
        preprocess: "Preprocess | None" = None,
        seed: int | None = None,
    ) -> None:
        if not 0 <= threshold <= 1 or views < 1 or not 0 <= pace <= 1:
            raise OptionError(
                f"threshold={threshold!r}, views={views!r}, pace={pace!r}: needed are a number in [0, 1], a whole "
                "number from 1 up, and a number in [0, 1]. CoTTA's are 0.92 (CIFAR-10), 32 and 0.999."
            )
        self.threshold, self.views, self.pace, self.symmetric = threshold, views, pace, symmetric
        self.augment = Augment(preprocess=preprocess, seed=seed)
        self.teacher = Average()
        self._target: Tensor | None = None

    def __call__(self, logits: Tensor, step: Step) -> Tensor:
        """Return the loss of one batch."""
        self.teacher.start(step.model)
        target = self._look(step)
        self._target = target
        rows = symmetric_cross_entropies(target, logits) if self.symmetric else cross_entropies(target, logits)
        return rows.mean()

    @torch.no_grad()
    def _look(self, step: Step) -> Tensor:
        """Return the teacher's logits."""
        anchor = with_weights(step.model, named_sources(step.model), step.images)
        if not bool(anchor.softmax(dim=1).amax(dim=1).mean() < self.threshold):
            return self.teacher.logits(step.model, step.images)
        if anchor.ndim > 2:
            return torch.stack([self._seen(step, view) for view in _sizes(step.images)]).mean(0)
        total = torch.zeros_like(anchor)
        for _ in range(self.views):
            view = self.augment(step.images, step.model.preprocess)
            total += self.teacher.logits(step.model, view)
        return total / self.views

    def _seen(self, step: Step, view: ReversibleView) -> Tensor:
        """Return the teacher's logits for a view of the pixels, back in their places."""
        images = view(step.images)
        try:
            return view.answer(self.teacher.logits(step.model, images))
        except (DataError, RuntimeError, ValueError, AssertionError) as error:
            if images.shape == step.images.shape or isinstance(error, torch.OutOfMemoryError):
                raise
            raise OutputError(
                f"the network failed on images of {images.shape[2]}×{images.shape[3]} ({error}); CoTTA looks at images "
                f"at seven sizes, from {SIZES[0]:g} to {SIZES[-1]:g} times their own. Choose a method that needs no "
                'other sizes, such as "undrift" or "tent", or larger images.'
            ) from error

    def answer(self, logits: Tensor) -> Tensor:
        """Return the teacher's logits for this batch."""
        return logits if self._target is None else self._target

    def follow(self, model: Perturbed) -> None:
        """Move the teacher towards the network."""
        self.teacher.follow(model, self.pace)

    def deployed(self, model: Perturbed) -> AbstractContextManager[Perturbed]:
        """Give the model the teacher's weights for the length of a `with` block.

        Before the first step the teacher is the network itself.
        """
        return self.teacher.deployed(model)

    def state_dict(self) -> dict[str, Any]:
        """Return the teacher and the state of the random views."""
        return {**self.teacher.state_dict(), **self.augment.state_dict()}

    def load_state_dict(self, state: dict[str, Any], model: Perturbed) -> None:
        """Go on from a state; without a teacher in it, start from the network."""
        self._target = None
        self.teacher.load_state_dict(state, model)
        self.augment.load_state_dict(state)

    def __repr__(self) -> str:
        names = ("threshold", "views", "pace", "symmetric")
        return "Cotta(" + ", ".join(f"{name}={getattr(self, name)!r}" for name in names) + ")"


def _sizes(images: Tensor) -> list[ReversibleView]:
    """Return the views of images whose pixels are answered: seven sizes, each also mirrored."""

    def sized(size: Sequence[int]) -> Callable[[Tensor], Tensor]:
        return lambda x: F.interpolate(x, tuple(size), mode="bilinear", align_corners=False)

    if images.ndim != 4:
        return [SAME]
    own = images.shape[2:]
    views = [ReversibleView(sized([max(1, round(side * scale)) for side in own]), sized(own)) for scale in SIZES]
    return [each for view in views for each in (view, view.then(VIEWS["mirror"]))]
