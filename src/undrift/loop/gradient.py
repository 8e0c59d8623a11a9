"""Compute the gradient of the objective (paper eq. 3) on one batch: the function that a CUDA graph records."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from undrift._types import Answering, Keeper, Likelihood, Step
from undrift.answer.forward import forward
from undrift.answer.prediction import mean_softmax
from undrift.answer.views import ViewsInUse
from undrift.likelihood import one_number
from undrift.likelihood.wrap import check_positions, warn_of_outputs
from undrift.objective import kl_term
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.state import extra_pass, noise_switched, weights_moved
from undrift.system import ranks

More = Callable[[Tensor], Sequence[Tensor]]


class GradientResult(NamedTuple):
    """What a gradient returns beside itself; all of it is still on the device.

    Attributes:
        answer: mean softmax over the draws, and the mean of its entropy; None where no answer is wanted.
        numbers: likelihood, KL, the gradient's norm, and whatever else the loop reads back, as one tensor; None where
            the likelihood asked nothing of this batch.
    """

    answer: tuple[Tensor, Tensor] | None
    numbers: Tensor | None


class Gradient:
    """Leaves the gradient of likelihood + KL + penalties on the learnables, and reads nothing back.

    It knows nothing of the loop around it: a stream holds the recording of it, and the recording must not hold the
    stream.

    Args:
        answers: whether the passes of a step are answers too (in a stream).
        more: returns more numbers to read back, from the logits of the last draw.
        views: of the images that answers are averaged over.
    """

    def __init__(
        self,
        model: Perturbed,
        likelihood: Likelihood,
        learnables: Sequence[nn.Parameter],
        keepers: Sequence[Keeper] = (),
        answers: bool = False,
        more: More | None = None,
        views: ViewsInUse | None = None,
    ) -> None:
        self.model, self.likelihood, self.learnables, self.keepers = model, likelihood, learnables, keepers
        self.answers, self.more, self.views = answers, more, views
        self._looked = False  # whether the outputs were found to be logits

    def keep(self) -> None:
        """Prepare for `put_back`. Nothing to do here: what moves is replaced, never changed in place."""

    def put_back(self) -> None:
        """Undo what happened in place since `keep`."""

    def forget(self) -> None:
        """Forget what is known of tensors that others have replaced."""

    def __call__(
        self,
        images: Tensor,
        size: int | Tensor,
        places: Tensor | None = None,
        progress: float = 0.0,
        climbed: bool = False,
    ) -> GradientResult:
        """Leave the gradient on the learnables, and return answer and numbers.

            mean over draws of likelihood(logits) + kl_term(size) + penalties

        Args:
            size: the data size of the bound; a tensor is not checked.
            places: of the images in their data set (over epochs).
            progress: the part of all steps that is done (over epochs).
            climbed: whether this is the second gradient of a step with the option `climb`.
        """
        model, key = self.model, self.model.key
        step = Step(model, images, partial(_extra_logits, model), places, progress, climbed)
        draws = max(1, model.options.train_samples)
        noisy = key.noisy and model.options.train_samples > 0
        answers = list[Tensor]()
        likelihood, asked = torch.zeros((), device=images.device), False
        for parameter in self.learnables:
            parameter.grad = None
        # Casts that autocast kept from a pass without gradients cut weights off, in some versions of torch. And casts
        # belong into a recording, for its replays to follow the weights.
        weights_moved()
        training, key.training = key.training, not climbed
        try:
            with torch.set_grad_enabled(bool(self.learnables)):
                for draw in range(draws):
                    logits = self._draw(images, noisy, extra=draw > 0 or climbed)
                    loss = self.likelihood(logits, step)
                    if loss is not None:
                        asked, loss = True, one_number(loss, logits) / draws
                        if self.learnables:
                            loss.backward()  # draw by draw: one graph at a time is held
                        likelihood = likelihood + loss.detach()
                    if self.answers and not climbed:
                        answers += [self._answer(logits.detach()), *self._other_views(images, noisy)]
                if asked and model.key.share is not None:
                    ranks.sum_over_processes([p.grad for p in self.learnables if p.grad is not None])
                kl = self._penalties(size) if asked and self.learnables else likelihood.new_zeros(())
        finally:
            key.training = training
        answer = mean_softmax(answers) if answers else None
        if not asked:
            return GradientResult(answer, None)
        # The norm, not the largest value: Adam keeps squares, and an infinite one would stop its parameter for ever.
        grads = [p.grad for p in self.learnables if p.grad is not None]
        # Of no tensors torch's norm is a zero on the CPU, and to bring that to a GPU is a wait.
        norm = get_total_norm(grads) if grads else likelihood.new_zeros(())
        more = () if self.more is None else self.more(logits.detach())
        return GradientResult(answer, torch.stack([t.detach().to(likelihood) for t in (likelihood, kl, norm, *more)]))

    def _draw(self, images: Tensor, noisy: bool, extra: bool) -> Tensor:
        """Return the logits of one draw. Statistics move in the first of a batch only; all are normalised alike."""
        with extra_pass(self.model, noisy) if extra else noise_switched(self.model.key, noisy):
            logits = forward(self.model, images)
        self.model.key.training = False
        check_positions(self.likelihood, logits)
        if not self._looked:
            self._looked = True
            warn_of_outputs(self.model, logits)
        return logits

    def _answer(self, logits: Tensor) -> Tensor:
        return self.likelihood.answer(logits) if isinstance(self.likelihood, Answering) else logits

    @torch.no_grad()
    def _other_views(self, images: Tensor, noisy: bool) -> list[Tensor]:
        """Return the answers to the images' views, under draws of their own."""
        if self.views is None or getattr(self.likelihood, "answers_alone", False):
            return []
        others = self.views.of(images)[1:]
        if not others:
            return []
        with extra_pass(self.model, noisy):
            return [self._answer(view.answer(forward(self.model, view(images)))) for view in others]

    def _penalties(self, size: int | Tensor) -> Tensor:
        """Add the gradients of the KL and of the keepers' penalties, and return the KL."""
        kl = kl_term(self.model, size)
        for penalty in (kl, *(keeper.penalty(self.model) for keeper in self.keepers)):
            if penalty is not None and penalty.requires_grad:
                penalty.backward()
        return kl


def _extra_logits(model: Perturbed, images: Tensor) -> Tensor:
    """Return logits for a likelihood that needs more images; update no statistics.

    A function of the model: as a method it would tie a likelihood that remembers its step to itself, and a stream that
    was stopped in one would keep the network until the garbage collector runs.
    """
    with extra_pass(model, model.key.noisy):
        return forward(model, images)
