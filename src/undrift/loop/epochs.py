"""The loop of `adapt`: epochs of whole steps, a state that can be written down at any of them, a verdict at the end."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from undrift._errors import DataError, OptionError, UndriftError
from undrift._types import Keeper, Likelihood, Refreshing
from undrift.answer.forward import finite_rows, forward
from undrift.judge.history import History, Row
from undrift.judge.verdict import Survey, Verdict, better, same_answers, survey
from undrift.loop import checkpoint, resume
from undrift.loop.indexed_loader import Pass
from undrift.loop.optimise import Schedule, optimiser_over_epochs
from undrift.loop.spread import spread_of_logits
from undrift.loop.step import NOTHING_ASKED, StepMark, Stepper, StepResult
from undrift.loop.unlabelled import Unlabelled
from undrift.options import Statistics
from undrift.posterior.batch import device_of, to_device
from undrift.posterior.layers import evaluating
from undrift.posterior.norm import MOVING
from undrift.posterior.outputs import logits
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.state import keeping_noise, one_pass, restore, snapshot
from undrift.system.interrupts import uninterrupted
from undrift.system.progress import Bar
from undrift.system.randomness import Randomness


class Run:
    """One adaptation, from its first step or from a checkpoint to its verdict."""

    def __init__(
        self,
        model: Perturbed,
        data: Unlabelled,
        looked_at: Unlabelled,
        likelihood: Likelihood,
        epochs: int,
        keep_best: bool,
        path: str | os.PathLike[str] | None,
        every: int | None,
        mark: str | None,
        keepers: Sequence[Keeper] = (),
    ) -> None:
        self.model, self.data, self.looked_at, self.likelihood = model, data, looked_at, likelihood
        self.epochs, self.keep_best, self.path, self.every, self.mark = epochs, keep_best, path, every, mark
        optimiser = optimiser_over_epochs(model, likelihood)
        self.stepper = Stepper(model, likelihood, optimiser, keepers, online=False, more=spread_of_logits)
        self.schedule = Schedule(optimiser, model.options.adapt_schedule == "shot", epochs * data.steps)
        self.randomness = Randomness(device_of(model), data.generators)
        self.identity: dict[str, Any] = {}
        # Where we are: whole epochs, batches of the one under way, and where its order came from (None before it).
        self.epoch = self.done = 0
        self.start: dict[str, Tensor] | None = None
        self.finished = False
        self.rows: list[Row] = []
        self.bad_images: set[int] = set()
        self.bad_steps = self.lone_batches = self.idle_steps = 0
        self.idle_epoch = 0  # the last epoch with a batch of which nothing was asked
        self.over = False  # the epoch's batches are used up; a sampler may have drawn once more to find that out
        self.lent = False  # the network is given back where this fails, and nobody has the model
        self.surveys: dict[int, Survey] = {}
        self.answers: dict[str, Tensor] = {}  # of the source network, and after the last survey
        self.best_epoch, self.best = 0, dict[str, Tensor]()
        # A likelihood that keeps labels but cannot give them away can go on at the start of an epoch only.
        self.anywhere = not isinstance(likelihood, Refreshing) or hasattr(likelihood, "state_dict")
        self.whole = True  # false while the state is one that cannot be written down

    @property
    def steps_done(self) -> int:
        """Batches gone through so far, over all epochs."""
        return self.epoch * self.data.steps + self.done

    # The loop ---------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Go on from the checkpoint, or look at the source network; everything wrong with the inputs shows here."""
        if self.path is not None:
            self.identity = resume.identity(self)
            if (found := checkpoint.read(self.path, self.identity)) is not None:
                resume.unpack(self, found)
                return
        # off() gives the flags of before `perturb` back: dropout, where that was in train mode.
        with self.model.off() as net, evaluating(net):
            # Through the model, which keeps a network from writing into the images.
            self.surveys[0], self.answers["source"] = self._survey(lambda images: logits(self.model(images)))
        if self.model.classes is not None and len(self.model.classes) != self.surveys[0].classes:
            raise OptionError(
                f"the model has {len(self.model.classes)} class names, its network {self.surveys[0].classes} outputs; "
                "needed: one name an output. Give perturb(classes=…) the names in the order of the outputs."
            )

    def go(self, bar: Bar) -> History:
        """Train what is left, and give the verdict."""
        try:
            while self.epoch < self.epochs:
                self._epoch(bar)
        except (KeyboardInterrupt, DataError) as stop:
            if self.whole and (self.anywhere or self.start is None):
                self._save()
            if isinstance(stop, KeyboardInterrupt):
                where = f"epoch {self.epoch + 1} of {self.epochs}, after {self.done} batches of it"
                stop.args = (f"adapt was stopped in {where}. {self._stands('there')} {self._go_on()}",)
            raise
        if not self.finished:
            self._finish()
        history = self.history()
        history.warn(stacklevel=4)
        return history

    def _epoch(self, bar: Bar) -> None:
        if self.start is None:
            self._begin_epoch()
        if not self.over:
            batches = self._batches()
            while self._step(batches, bar):
                if self.every is not None and self.done % self.every == 0 and self.anywhere:
                    self._save()
        if self.epoch + 1 not in (self.rows[-1].epoch if self.rows else 0, self.idle_epoch):
            raise DataError(
                f"epoch {self.epoch + 1} made no step: {len(self.bad_images)} images with NaN or infinity, "
                f"{self.bad_steps} losses or gradients not finite, {self.lone_batches} batches of one. Needed: at "
                "least one sound step an epoch. Look at the images and the network's output first."
            )
        self._end_epoch()

    def _batches(self) -> Pass:
        """Return the batches of this epoch that are still to come."""
        batches = self._sound(self.data.epoch())
        if self.done:
            # A resumed epoch draws its order again and passes by the batches it has done.
            assert self.start is not None
            self.whole, now = False, self.randomness.state()
            self.randomness.put(self.start)
            for _ in range(self.done):
                next(batches, None)
            self.randomness.put(now)
            self.whole = True
        return batches

    def _step(self, batches: Pass, bar: Bar) -> bool:
        """Make one step, all of it or nothing; return whether there was a batch left."""
        before, mark, random = self.steps_done, self.stepper.mark(), self.randomness.state()
        shown: dict[str, float] = {}
        try:
            batch = next(batches, None)
            if batch is None:
                self.over = True
                return False
            places, images = batch
            if len(images) == 0:
                self.done += 1
            elif len(images) == 1 and self._looks_at_batches("batch", *MOVING):
                with uninterrupted():
                    self.lone_batches += 1
                    self.done += 1
            else:
                shown = self._take(places, images, before, mark)
        except BaseException:
            if self.steps_done == before:
                self.over = False
                mark.undo()
                self.randomness.put(random)
            raise
        bar.advance(epoch=f"{self.epoch + 1}/{self.epochs}", **shown)
        return True

    def _take(self, places: Tensor, images: Tensor, before: int, mark: StepMark) -> dict[str, float]:
        """Make the step on a batch of several images, count it, and return the numbers to show."""
        lr = self.model.options.adapt_lr * self.schedule.set(before + 1)
        shown: dict[str, float] = {}

        def count(step: StepResult) -> None:
            if step.why_not is None and step.numbers is not None:
                likelihood, kl, _, entropy, balance = step.numbers
                loss = likelihood + kl
                self.rows.append(Row(self.epoch + 1, before + 1, loss, likelihood, kl, entropy, balance, lr))
                shown.update(loss=loss, kl=kl, entropy=entropy, balance=balance)
            elif step.why_not == NOTHING_ASKED:
                self.idle_steps, self.idle_epoch = self.idle_steps + 1, self.epoch + 1
            else:
                self.bad_steps += 1
            self.done += 1

        progress = before / self.schedule.total
        self.stepper.step(images, self.data.size, mark, count, places=places, progress=progress)
        return shown

    def _begin_epoch(self) -> None:
        fresh = resume.pack(self) if self.path is not None and self.epoch == 0 else None
        self.whole = False  # a refresh may move norm statistics: half of that is no state to write down
        if isinstance(self.likelihood, Refreshing):
            with self.randomness.kept():
                self.likelihood.refresh(self.model, self._everything)
        if fresh is not None and self.path is not None:
            # A disk that cannot be written to shows before hours of work; but not before the likelihood has shown that
            # it can look at this network: a file from before that would bind the user to a misspelt one.
            fresh.write(self.path)
        self.start = self.randomness.state()
        self.whole = True

    def _end_epoch(self) -> None:
        epoch = self.epoch + 1
        found: tuple[Survey, Tensor] | None = None
        if self.keep_best or epoch >= self.epochs - 1:
            with one_pass(self.model):
                self.model.key.step.zero_()  # the same noise in each survey: else it, too, would change answers
                now, answers = self._survey(lambda images: forward(self.model, images))
            if self.looked_at.aligned:
                known = epoch - 1 in self.surveys and epoch > 1
                stability = same_answers(answers, self.answers["last"]) if known else None
                now = replace(now, agreement=same_answers(answers, self.answers["source"]), stability=stability)
            found = now, answers
        with uninterrupted():
            if found is not None:
                self.surveys[epoch], self.answers["last"] = found
                if self.keep_best and self._is_best(found[0]):
                    self.best_epoch, self.best = epoch, snapshot(self.model)
            self.epoch, self.done, self.start, self.over = epoch, 0, None, False
        self._save()

    def _is_best(self, now: Survey) -> bool:
        return self.best_epoch == 0 or better(self.surveys[0], now, self.surveys[self.best_epoch])

    def _finish(self) -> None:
        if self.keep_best and self.best_epoch != self.epochs:
            key = {"key.seed": self.model.key.seed.clone(), "key.step": self.model.key.step.clone()}
            restore(self.model, self.best | key)
        self.finished = True
        self._save()

    def history(self) -> History:
        """Return what happened so far."""
        kept = self.best_epoch if self.keep_best and self.finished else self.epoch
        verdict = Verdict(self.surveys[0], self.surveys[kept]) if self.finished else None
        bad = tuple(sorted(self.bad_images))
        counts = bad, self.bad_steps, self.lone_batches, self.idle_steps
        return History(tuple(self.rows), dict(self.surveys), verdict, kept, *counts, self.model)

    # The images -------------------------------------------------------------------------------------------------

    def _sound(self, batches: Pass) -> Pass:
        """Yield the batches where the model is, without images that hold NaN or infinity; a batch may end up empty."""
        while True:
            try:
                batch = next(batches, None)
            except UndriftError:
                raise
            except Exception as error:
                raise DataError(
                    f"unlabelled raised {type(error).__name__} ({error}) in epoch {self.epoch + 1}, after {self.done} "
                    f"batches of it; adapt needs all its batches. Mend the data set. "
                    f"{self._stands('at the last whole step')} {self._go_on()}"
                ) from error
            if batch is None:
                return
            where, images = batch[0], to_device(batch[1], self.model)
            finite = finite_rows(images)
            if not bool(finite.all()):
                here = finite.cpu()
                self.bad_images.update(where[~here].tolist())
                where, images = where[here], images[finite]
            yield where, images

    def _everything(self) -> Pass:
        """Yield every sound image of the domain once; a lone one has no batch statistics to be looked at with."""
        least = 2 if self._looks_at_batches("batch") else 1
        for where, images in self._sound(self.looked_at.everything()):
            if len(images) >= least:
                yield where, images

    def _looks_at_batches(self, *how: Statistics) -> bool:
        """Whether a batch of one is an odd one out, and norm layers would take it for the domain."""
        return self.data.size > self.data.steps and any(policy.statistics in how for policy in self.model.norms)

    def _survey(self, forward: Callable[[Tensor], Tensor]) -> tuple[Survey, Tensor]:
        # A look changes nothing: neither the noise nor the order of what comes after it.
        with keeping_noise(self.model.key), self.randomness.kept():
            return survey(forward, self._everything())

    # The checkpoint ---------------------------------------------------------------------------------------------

    def _save(self) -> None:
        if self.path is not None:
            try:
                resume.pack(self).write(self.path)
            except DataError:
                self.whole = False  # a disk that failed is not tried again on the way out
                raise

    def _stands(self, where: str) -> str:
        if self.lent:
            return "The network is as it was before the call."
        return f"The model stands {where} and can be used."

    def _go_on(self) -> str:
        if self.path is None:
            return "With checkpoint=… a run could go on from there."
        return f"Call adapt again with checkpoint={str(self.path)!r} to go on."
