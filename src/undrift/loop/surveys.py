"""Survey a domain before and after epochs of `adapt`, without labels; keep the best state; test the views of images."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from undrift.answer.forward import forward
from undrift.answer.views import AUTO, VIEWS, SafeViews, drawn_views
from undrift.judge.accuracy import Helping
from undrift.judge.verdict import Survey, Verdict, better, same_answers, survey
from undrift.loop.finite_images import Failed, FiniteImages
from undrift.loop.helped import Sample, compare
from undrift.packs.evidence import KEPT_STATISTICS, gathering_moments, has_moments
from undrift.posterior.attached import root_of
from undrift.posterior.batch import to_device
from undrift.posterior.kept_statistics import keep_statistics
from undrift.posterior.layers import evaluating
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.state import keeping_noise, one_pass, restore, restore_source, snapshot
from undrift.system.randomness import Randomness


class Surveys:
    """The surveys of the domain by epoch, and the adapted state of the best epoch.

    Attributes:
        found: surveys by epoch; 0 is the source network.
        answers: by place, of the "source" network, and of the "last" survey.
        best_epoch: the epoch whose state is `best`; 0 if none is kept.
        views: the views that were found safe; None if they were not tested.
        helping: whether adaptation helped; None before `settle_helping`.
        put_back: whether the source was put back after that.
    """

    def __init__(
        self, model: Perturbed, images: FiniteImages, randomness: Randomness, keep_best: bool, epochs: int
    ) -> None:
        self.model, self.images, self.randomness, self.keep_best = model, images, randomness, keep_best
        self.found: dict[int, Survey] = {}
        self.answers: dict[str, Tensor] = {}
        self.best_epoch, self.best = 0, dict[str, Tensor]()
        self.views: tuple[str, ...] | None = None
        self.helping: Helping | None = None
        self.put_back = False
        self._sample = Sample(images.looked_at.size, epochs * images.looked_at.size, model.key)

    def look_at_source(self, failed: Failed) -> None:
        """Survey the source network."""
        # off() gives the flags from before `perturb` back: dropout, where that was in train mode.
        with self.model.off() as net, evaluating(net), gathering_moments(self.model) as add_moments:

            def ask(images: Tensor) -> Tensor:
                # Through the model, which keeps a network from writing into the images.
                answer = forward(self.model, images)
                add_moments()
                return answer

            self.found[0], self.answers["source"] = self._survey(ask, failed)

    def look(self, epoch: int, failed: Failed) -> tuple[Survey, Tensor]:
        """Return the survey after an epoch, which compares it with the source and the epoch before, and the answers."""
        with one_pass(self.model):
            self.model.key.step.zero_()  # the same noise in each survey: else it, too, would change answers
            now, answers = self._survey(lambda images: forward(self.model, images), failed)
        if self.images.looked_at.aligned:
            known = epoch - 1 in self.found and epoch > 1
            stability = same_answers(answers, self.answers["last"]) if known else None
            now = replace(now, agreement=same_answers(answers, self.answers["source"]), stability=stability)
        return now, answers

    def keep(self, epoch: int, now: Survey, answers: Tensor) -> None:
        """Keep what `look` found, and the network's state if it is the best so far."""
        self.found[epoch], self.answers["last"] = now, answers
        if self.keep_best and (self.best_epoch == 0 or better(self.found[0], now, self.found[self.best_epoch])):
            self.best_epoch, self.best = epoch, snapshot(self.model)

    def put_best_back(self, epoch: int) -> None:
        """Restore the best epoch's state, if that is wanted and differs; noise continues."""
        if self.keep_best and self.best_epoch != epoch:
            key = {"key.seed": self.model.key.seed.clone(), "key.step": self.model.key.step.clone()}
            restore(self.model, self.best | key)

    def describe_domain(self, failed: Failed) -> None:
        """Collect what the model's pack holds of its domain: moments for the router, statistics for single images.

        The survey of the source network has collected the moments, except in a resumed run or a compiled network.
        """
        by_batch = any(policy.statistics == "batch" for policy in self.model.norms)
        if has_moments(self.model) and not by_batch:
            return
        with self.randomness.kept(), torch.no_grad():
            if not has_moments(self.model):
                with self.model.off() as net, evaluating(net), gathering_moments(self.model, eager=True) as add_moments:
                    for _, images in self.images.everything(failed):
                        root_of(net)(to_device(images, self.model).clone())
                        add_moments()
            if by_batch:
                batches = (images for _, images in self.images.everything(failed))
                keep_statistics(self.model, batches)
                self.model.facts[KEPT_STATISTICS] = True

    def settle_views(self, failed: Failed) -> None:
        """Choose the views to answer over with the adapted network, if the option is "auto".

        The test uses the whole domain, as images of one class may come together; the views that pass replace "auto".
        """
        if self.model.options.answer_views == (AUTO,):
            self.views = self.safe_views(failed)
            self.model.options = self.model.options.replace(answer_views=self.views)

    def safe_views(self, failed: Failed) -> tuple[str, ...]:
        """Return the views that pass the test without labels by the network as it is; none with few images."""
        test = SafeViews(tuple(VIEWS))
        with self.randomness.kept(), one_pass(self.model), torch.no_grad():
            self.model.key.step.zero_()
            for _, images in self.images.everything(failed):
                if images.ndim == 4:
                    given = to_device(images, self.model)
                    answers = forward(self.model, given)
                    for name, view in VIEWS.items():
                        test.look(answers, name, view.answer(forward(self.model, view(given))))
        return test.passed or ()

    def settle_helping(self, failed: Failed) -> None:
        """Estimate whether adaptation helped, on a sample of the images and the views that answers take."""
        with keeping_noise(self.model.key), self.randomness.kept():
            if not (batches := self._sample.batches()):  # a run that went on from its last epoch
                for _ in self._sample.of(self.images.everything(failed)):
                    pass
                batches = self._sample.batches()
            named = self.model.options.answer_views or None
            self.helping = compare(self.model, batches, named if self.views is None else self.views)

    def put_source_back(self) -> None:
        """Restore the source, and answer without noise or views: what it answered before, it answers again."""
        restore_source(self.model)
        self.model.options = self.model.options.replace(test_samples=0, answer_views=())
        self.put_back, self.views = True, None if self.views is None else ()

    def verdict(self, epoch: int) -> Verdict:
        """Return the verdict on the network of an epoch."""
        return Verdict(self.found[0], self.found[epoch], self.helping, self.put_back)

    def _survey(self, ask: Callable[[Tensor], Tensor], failed: Failed) -> tuple[Survey, Tensor]:
        # A look changes nothing: neither the noise nor the order of what comes after it.
        with keeping_noise(self.model.key), self.randomness.kept():
            return survey(ask, self._sample.of(self.images.everything(failed)))


class StepViews:
    """The views that steps draw from, by the option `step_views`.

    "auto" means those that answers are averaged over: the ones named in `answer_views`, or those that pass the test
    without labels. Where the caller gives `clean` images, the others are augmented already, and no view is drawn.

    Attributes:
        names: of the views; None before they are decided.
    """

    def __init__(self, model: Perturbed, images: FiniteImages, surveys: Surveys) -> None:
        self.model, self.images, self.surveys = model, images, surveys
        self.names: tuple[str, ...] | None = None
        self._epoch, self._chances = -1, torch.empty(0)

    def decide(self, failed: Failed) -> None:
        """Decide, once; the test asks the network whose norm statistics have seen the domain."""
        if self.names is None:
            options = self.model.options
            asked = options.step_views if self.images.looked_at is self.images.data else ()
            asked = options.answer_views if asked == (AUTO,) else asked
            self.names = self.surveys.safe_views(failed) if asked == (AUTO,) else asked

    def of(self, images: Tensor, places: Tensor, epoch: int) -> Tensor:
        """Return the images of a batch in views of their own.

        A view depends on the image's place and the epoch alone, so that a run that resumes, or is shared among
        processes, draws the same.
        """
        if not self.names or images.ndim != 4:
            return images
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(epoch)
            self._epoch, self._chances = epoch, torch.rand(self.images.data.size, 3, generator=generator)
        if (share := self.model.key.share) is not None:
            places = places[share.first : share.first + share.own]
        return drawn_views(images, self.names, self._chances[places])
