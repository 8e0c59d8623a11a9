"""Answer each batch of a stream, and learn from its images at once or together with later ones."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from undrift._types import Deploying, SelfPaced
from undrift.answer.average import average_finite
from undrift.answer.forward import forward
from undrift.answer.prediction import Prediction
from undrift.answer.temperature import logits_once
from undrift.answer.views import SAME, ReversibleView
from undrift.loop.balanced import BalancedGather
from undrift.loop.gather import Gather
from undrift.loop.online import OnlineSteps
from undrift.loop.pacing import Pacing, answer_of_run, limits
from undrift.loop.step import NOTHING_ASKED
from undrift.options import Answer, answering_draws
from undrift.posterior.layers import evaluating
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.state import one_pass, quiet_statistics


class Learning:
    """Makes the steps of a stream and answers its batches; the images that it is given are finite.

    Args:
        gather: keeps images until they are enough for a step; None makes the steps of each batch on itself.
        pacing: decides that, batch by batch; None where the likelihood cannot tell, or the user has said.
    """

    def __init__(
        self,
        online: OnlineSteps,
        answer: Answer,
        gather: Gather | BalancedGather | None,
        pacing: Pacing | None = None,
    ) -> None:
        self.online, self.model, self.answer, self.gather = online, online.model, answer, gather
        self.pacing = pacing

    def __call__(self, images: Tensor, sound: Tensor | None) -> Prediction:
        """Return the answer to a batch, which made the steps that were due.

        Args:
            sound: for each image of the user's batch, whether it is among these; None where all are.
        """
        if self.pacing is not None:
            return self._paced(self.pacing, images, sound)
        if self.gather is None:
            return self._at_once(images, sound)
        if isinstance(self.gather, BalancedGather):
            return self._balanced(self.gather, images, sound)
        return self._together(self.gather, images, sound)

    @contextmanager
    def answering(self) -> Iterator[Perturbed]:
        """Give the model with the weights that answer: CoTTA's teacher's, else its own."""
        likelihood = self.online.likelihood
        with likelihood.deployed(self.model) if isinstance(likelihood, Deploying) else nullcontext():
            yield self.model

    @property
    def runs(self) -> bool:
        """Whether classes come in runs."""
        return self.pacing is not None and self.pacing.runs

    @torch.no_grad()
    def source(self, images: Tensor) -> Tensor:
        """Return the source network's probabilities."""
        # off() restores the flags from before `perturb`: with dropout, if the network was in train mode.
        with self.model.off() as net, evaluating(net):
            return forward(self.model, images).softmax(1)

    def views_alone(self, images: Tensor, view: ReversibleView) -> tuple[Tensor, Tensor]:
        """Return the network's probabilities for images and for a view of them, each by itself."""
        likelihood = self.online.likelihood
        if isinstance(likelihood, SelfPaced) and likelihood.supports(self.model):
            one, other = likelihood.each_alone(self.model, images, [SAME, view], counted=not self.runs)
            return one, other
        with self.answering(), one_pass(self.model), torch.no_grad():
            one = forward(self.model, images).softmax(1)
            return one, view.answer(forward(self.model, view(images))).softmax(1)

    def _paced(self, pacing: Pacing, images: Tensor, sound: Tensor | None) -> Prediction:
        """Learn from a batch at once, with others, or through a balanced memory, and return its answer."""
        likelihood = self.online.likelihood
        assert isinstance(likelihood, SelfPaced), "pacing is for likelihoods that can tell"
        if pacing.maps is None:
            # Of all images: an error then shows the user's batch.
            pacing.maps = likelihood.answer_alone(self.model, images, counted=False).ndim != 2
        if pacing.maps or pacing.whole(images):
            if pacing.maps or self._sample(pacing, likelihood, images):
                prediction = self._at_once(images, sound)
                self._note_domain(likelihood)
                return prediction
            gathered = images
            found = probs = self._in_run(likelihood, images)
        else:
            probs = (
                self._in_run(likelihood, images)
                if pacing.runs
                else likelihood.answer_alone(self.model, images, counted=True)
            )
            enough = pacing.gather.enough(images)
            if enough is None:
                pacing.gather.keep(images)
                return Prediction.of(probs, None, sound)
            pacing.gather.forget(images)
            if self._sample(pacing, likelihood, enough):
                self._steps_of(pacing, enough, images, None)
                return Prediction.of(probs, None, sound)
            gathered, found = enough, likelihood.answer_alone(self.model, enough, counted=False)

        pacing.remember(gathered, found, lambda full, new: self._steps_of(pacing, full, images, new))
        return Prediction.of(probs, None, sound)

    def _sample(self, pacing: Pacing, likelihood: SelfPaced, images: Tensor) -> bool:
        """Return whether images are a sample of the domain."""
        views, _, left = limits(pacing.runs)
        return pacing.sample(likelihood.doubt(self.model, images, views, left))

    def _in_run(self, likelihood: SelfPaced, images: Tensor) -> Tensor:
        """Return probabilities for images whose classes come in runs: the source network's have a say, too."""
        own = likelihood.answer_alone(self.model, images, counted=False)
        return answer_of_run(self.source(images), own)

    def _note_domain(self, likelihood: SelfPaced) -> None:
        if likelihood.new_domain:
            likelihood.new_domain = False
            why = "these images do not fit the norm statistics of those before"
            self.online.report.event("domain changed", why)

    def _steps_of(self, pacing: Pacing, gathered: Tensor, images: Tensor, new: int | None) -> bool:
        sane = self._steps_on(pacing, gathered, images, new)
        assert isinstance(self.online.likelihood, SelfPaced), "pacing is for likelihoods that can tell"
        self._note_domain(self.online.likelihood)
        return sane

    def _at_once(self, images: Tensor, sound: Tensor | None) -> Prediction:
        """Make the steps of one batch, and return its answer."""
        before, was_reset = self._steps(images)
        if self.answer == "before" and not was_reset:
            return Prediction.of(*before, sound)
        draws = self.model.options.test_samples if self.answer == "samples" else 1
        return average_finite(self.model, images, sound, draws, views=self.online.views.of(images))

    def _together(self, gather: Gather, images: Tensor, sound: Tensor | None) -> Prediction:
        """Make the steps on all that waits, where that is enough, and return the answer of the network then."""
        enough = gather.enough(images)
        if enough is not None:
            self._steps_on(gather, enough, images)
            gather.forget(images)
        prediction = self._answer(images, sound)
        if enough is None:
            gather.keep(images)  # once it is answered: what raises is nothing to learn from
        return prediction

    def _balanced(self, gather: BalancedGather, images: Tensor, sound: Tensor | None) -> Prediction:
        """Make a step on the balanced memory, these images in it, where it is time for one, and return the answer."""
        memory = gather.of(images)
        if memory.due(len(images)):  # one more pass: a memory needs their classes first
            with self.answering(), torch.no_grad():
                found = Prediction.of(logits_once(self.model, images).softmax(1)).label
            full = memory.added(images, found)
            if full.ready:
                assert full.images is not None
                sane = self._steps_on(gather, full.images, images, full.new)
                prediction = self._answer(images, sound)
                # What made no sound step would be there at the next one, too.
                gather.learned(images, full) if sane else gather.forget(images)
                return prediction
        prediction = self._answer(images, sound)
        gather.put(images, memory.added(images, prediction.label if sound is None else prediction.label[sound]))
        return prediction

    def _steps_on(
        self, gather: Gather | BalancedGather | Pacing, gathered: Tensor, images: Tensor, new: int | None = None
    ) -> bool:
        """Make the steps on what was gathered; return whether they were sound.

        Args:
            images: of this batch; what was gathered is like them.
            new: how many of what was gathered no step has seen; None is all.
        """
        missed = self.online.report.missed
        try:
            _, was_reset = self._steps(gathered, new)
        except Exception:  # after Ctrl-C they wait on; what cannot be learned must not stop every later image
            gather.forget(images)
            raise
        report = self.online.report
        asked = report.missed == missed or report.missed_at[-1][1] == NOTHING_ASKED
        return asked and not was_reset

    def _answer(self, images: Tensor, sound: Tensor | None) -> Prediction:
        """Return the answer of the network as its last step left it."""
        options = self.model.options
        draws = answering_draws(options, self.answer)
        if quiet_statistics(self.model) and (options.train_samples or not self.online.seen):
            draws = 0  # no noisy step was made yet: it is the source network, whose statistics fit no draws
        with self.answering():
            return average_finite(self.model, images, sound, draws, views=self.online.views.of(images))

    def _steps(self, images: Tensor, new: int | None = None) -> tuple[tuple[Tensor, Tensor], bool]:
        """Make the steps of a batch; return the first one's answer, and whether the start state was restored."""
        before = self.online.step(images, new)
        for _ in range(1, self.model.options.stream_steps):
            self.online.step(images)
        return before, self.online.reset_if_broken()
