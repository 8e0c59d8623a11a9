"""CoTTA: a student that follows its own average, which looks at many views where it is unsure (Wang et al. 2022)."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from undrift._errors import OptionError
from undrift._types import Step, named_learnables, named_sources
from undrift.likelihood.augment import Augment
from undrift.likelihood.rows import cross_entropies, symmetric_cross_entropies
from undrift.posterior.outputs import logits as logits_of
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.state import beside_a_step
from undrift.system.autocast import weights_moved
from undrift.system.interrupts import surely

if TYPE_CHECKING:
    from undrift.images.preprocess import Preprocess

_TEACHER = "teacher."


class Cotta:
    """Cross-entropy of the network to its teacher, an average over its own past.

        mean_i −Σ_c t_ic log p_ic     t the teacher's softmax, without gradient

    The anchor, the source's weights, decides for the whole batch: where its mean confidence is below the threshold, the
    teacher's logits are averaged over `views` augmented views, else it sees the images as they are. All three are one
    network under the same norm policy, with other weights. The answer is the teacher's logits that were the target.
    The teacher starts where the network does and moves after each step, before any keeper:

        teacher = pace · teacher + (1 − pace) · network     for all that is trained

    What is left in the model after a stream is the student, some of its weights just restored, though every answer was
    the teacher's. `deployed` puts the teacher in its place, to predict with it or to save it.

    Args:
        threshold: 0.92 on CIFAR-10, 0.72 on CIFAR-100, 0.1 on ImageNet.
        views: how many views are averaged.
        pace: what is kept of the teacher.
        symmetric: take the mean of both directions of the cross-entropy (ImageNet).
        preprocess: see `Augment`.
        seed: of the views; without it torch's global generator gives one.
    """

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
        self.teacher: dict[str, Tensor] = {}
        self._target: Tensor | None = None

    def __call__(self, logits: Tensor, step: Step) -> Tensor:
        """Return the loss of one batch."""
        if not self.teacher:
            self.teacher = {name: p.detach().clone() for name, p in named_learnables(step.model).items()}
        target = self._look(step)
        self._target = target
        rows = symmetric_cross_entropies(target, logits) if self.symmetric else cross_entropies(target, logits)
        return rows.mean()

    @torch.no_grad()
    def _look(self, step: Step) -> Tensor:
        """Return the teacher's logits."""
        anchor = _with_weights(step.model, named_sources(step.model), step.images)
        if not bool(anchor.softmax(dim=1).amax(dim=1).mean() < self.threshold):
            return _with_weights(step.model, self.teacher, step.images)
        total = torch.zeros_like(anchor)
        for _ in range(self.views):
            view = self.augment(step.images, step.model.preprocess)
            total += _with_weights(step.model, self.teacher, view)
        return total / self.views

    def answer(self, logits: Tensor) -> Tensor:
        """Return the teacher's logits for this batch."""
        return logits if self._target is None else self._target

    @torch.no_grad()
    def follow(self, model: Perturbed) -> None:
        """Move the teacher towards the network."""
        for name, parameter in named_learnables(model).items():
            self.teacher[name].lerp_(parameter, 1 - self.pace)

    @contextmanager
    def deployed(self, model: Perturbed) -> Iterator[Perturbed]:
        """Give the model with the teacher's weights, whose the answers were, for the length of a `with` block.

        Before the first step the teacher is the network itself.
        """
        trained = {name: p for name, p in named_learnables(model).items() if name in self.teacher}
        student = {name: p.detach().clone() for name, p in trained.items()}
        try:
            _put(trained, self.teacher)
            yield model
        finally:
            surely(lambda: _put(trained, student))

    def state_dict(self) -> dict[str, Any]:
        """Return the teacher, and where the views stand."""
        return {**{_TEACHER + name: t for name, t in self.teacher.items()}, **self.augment.state_dict()}

    def load_state_dict(self, state: dict[str, Any], model: Perturbed) -> None:
        """Go on from a state; one without a teacher has it start anew from the network."""
        trained, self._target = named_learnables(model), None
        self.teacher = {n: state[_TEACHER + n].to(p) for n, p in trained.items() if _TEACHER + n in state}
        self.augment.load_state_dict(state)

    def __repr__(self) -> str:
        names = ("threshold", "views", "pace", "symmetric")
        return "Cotta(" + ", ".join(f"{name}={getattr(self, name)!r}" for name in names) + ")"


@torch.no_grad()
def _put(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(values[name])
    weights_moved()


def _with_weights(model: Perturbed, weights: dict[str, Tensor], images: Tensor) -> Tensor:
    """Return the logits of the mean network with other weights, normalised as in a step."""
    with beside_a_step(model, noisy=False):
        try:
            return logits_of(torch.func.functional_call(model, weights, (images,)))
        except BaseException:
            # An error or Ctrl-C inside a norm layer: its flags are given back now, before eval mode ends.
            for policy in model.norms:
                policy.settle()
            raise
