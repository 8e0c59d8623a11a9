"""Run `adapt`: epochs of whole steps, a state that can be saved after any step, and a verdict at the end."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from undrift._errors import DataError, ProcessLost
from undrift._types import Keeper, Likelihood, Refreshing
from undrift.answer.prediction import entropy_and_balance
from undrift.judge.history import History, HistoryRow
from undrift.loop import checkpoint, resume
from undrift.loop.finite_images import FiniteImages
from undrift.loop.indexed_loader import Pass
from undrift.loop.optimise import Schedule, optimiser_over_epochs
from undrift.loop.setup import EpochPlan, check_in_sync, sync_randomness, sync_start
from undrift.loop.step import NOTHING_ASKED, StepMark, Stepper, StepResult
from undrift.loop.surveys import StepViews, Surveys
from undrift.packs.evidence import set_facts
from undrift.posterior.batch import device_of
from undrift.posterior.norm import MOVING
from undrift.posterior.perturbed import Perturbed
from undrift.system import ranks
from undrift.system.interrupts import uninterrupted
from undrift.system.progress import Bar
from undrift.system.randomness import Randomness


class Run:
    """One adaptation, from its first step or from a checkpoint to its verdict.

    Args:
        from_plain: whether the caller gave a plain network, which a failure restores.
    """

    def __init__(
        self,
        model: Perturbed,
        images: FiniteImages,
        likelihood: Likelihood,
        keepers: Sequence[Keeper],
        plan: EpochPlan,
        from_plain: bool = False,
    ) -> None:
        self.model, self.images, self.likelihood, self.plan = model, images, likelihood, plan
        self.from_plain = from_plain
        optimiser = optimiser_over_epochs(model, likelihood)
        self.stepper = Stepper(model, likelihood, optimiser, keepers, online=False, more=entropy_and_balance)
        falling, self.steps = model.options.adapt_schedule == "shot", plan.epochs * images.data.steps
        self.schedule = Schedule(optimiser, falling, self.steps)
        self.randomness = Randomness(device_of(model), images.data.generators)
        self.surveys = Surveys(model, images, self.randomness, plan.keep_best, plan.epochs)
        self.step_views = StepViews(model, images, self.surveys)
        self.identity: dict[str, Any] = {}
        # Where we are: whole epochs, batches of the current one, and where its order came from (None before it).
        self.epoch = self.done = 0
        self.start: dict[str, Tensor] | None = None
        self.finished = False
        self.rows: list[HistoryRow] = []
        self.bad_steps = self.lone_batches = self.idle_steps = 0
        self.idle_epoch = 0  # the last epoch with a batch of which nothing was asked
        self.over = False  # the epoch's batches are used up; a sampler may have drawn once more to find that out
        # A likelihood that keeps labels but cannot save them can go on at the start of an epoch only.
        self.anywhere = not isinstance(likelihood, Refreshing) or hasattr(likelihood, "state_dict")
        self.whole = True  # false while the state is one that cannot be saved
        self.sent = self.sent_steps = 0  # bytes given to other processes, and the steps in which they were

    @property
    def steps_done(self) -> int:
        """Batches gone through so far, over all epochs."""
        return self.epoch * self.images.data.steps + self.done

    # The loop ---------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Go on from the checkpoint, or survey the source network; everything wrong with the inputs shows here."""
        if self.plan.checkpoint is not None or ranks.world_size() > 1:
            self.identity = resume.identity(self)
        sync_start(self.model, self.randomness, self.identity)
        path = self.plan.checkpoint
        found = None if path is None else checkpoint.read(path, self.identity)
        ranks.require_equal("nothing" if found is None else str(found.values), f"a checkpoint at {path}")
        if found is not None:
            resume.unpack(self, found)
            return
        self.surveys.look_at_source(self._failed)

    def go(self, bar: Bar) -> History:
        """Train what is left, and give the verdict."""
        try:
            while self.epoch < self.plan.epochs:
                self._epoch(bar)
        except (KeyboardInterrupt, DataError, ProcessLost) as stop:
            if self.whole and (self.anywhere or self.start is None):
                self._save()
            if isinstance(stop, KeyboardInterrupt):
                where = f"epoch {self.epoch + 1} of {self.plan.epochs}, after {self._batches_done()}"
                stop.args = (f"adapt was stopped in {where}. {self._advice('there')}",)
            raise
        if not self.finished:
            self._finish()
        self.surveys.settle_views(self._failed)
        self.surveys.describe_domain(self._failed)
        self.surveys.settle_helping(self._failed)
        history = self.history()
        assert history.verdict is not None
        if self.plan.keep == "safe" and history.verdict.hurt:
            self.surveys.put_source_back()
            history = self.history()
        # Anew, as what a pack said of itself before is over: the day it was made, too.
        images = self.images.data.size - len(history.bad_images)
        set_facts(self.model, images=images, verdict=str(history.verdict))
        history.warn()
        return history

    def _epoch(self, bar: Bar) -> None:
        if self.start is None:
            self._begin_epoch()
        if not self.over:
            batches, every = self._batches(), self.plan.checkpoint_steps
            while self._step(batches, bar):
                if every is not None and self.done % every == 0 and self.anywhere:
                    self._save()
        if self.epoch + 1 not in (self.rows[-1].epoch if self.rows else 0, self.idle_epoch):
            raise DataError(
                f"epoch {self.epoch + 1} made no step: {len(self.images.bad)} images with NaN or infinity, "
                f"{self.bad_steps} losses or gradients not finite, {self.lone_batches} batches of one. Needed: at "
                "least one sound step per epoch. Look at the images and the network's output first."
            )
        self._end_epoch()

    def _batches(self) -> Pass:
        """Return the batches of this epoch that are still to come."""
        batches = self.images.epoch(self._failed)
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
        """Take one batch and make its step, all of it or nothing; return whether there was a batch left."""
        before, mark, random = self.steps_done, self.stepper.mark(), self.randomness.state()
        shown: dict[str, float] = {}
        try:
            batch = next(batches, None)
            if batch is None:
                self.over = True
                return False
            places, images = batch
            lone = len(places) == 1 and self.images.lone_ones_out("batch", *MOVING)
            if lone or not len(places):
                with uninterrupted():
                    self.lone_batches += lone
                    self.done += 1
            else:
                shown = self._learn(places, images, mark)
        except BaseException:
            if self.steps_done == before:  # the batch may come again
                self.over = False
                mark.undo()
                self.randomness.put(random)
            raise
        bar.advance(epoch=f"{self.epoch + 1}/{self.plan.epochs}", **shown)
        return True

    def _learn(self, places: Tensor, images: Tensor, mark: StepMark) -> dict[str, float]:
        """Make the step on a batch, count it, and return the numbers to show."""
        before, shown, sent = self.steps_done, dict[str, float](), ranks.bytes_sent()
        lr = self.model.options.adapt_lr * self.schedule.set(before + 1)

        def count(step: StepResult) -> None:
            if step.why_not is None and step.numbers is not None:
                likelihood, kl, _, entropy, balance = step.numbers
                loss = likelihood + kl
                self.rows.append(HistoryRow(self.epoch + 1, before + 1, loss, likelihood, kl, entropy, balance, lr))
                shown.update(loss=loss, kl=kl, entropy=entropy, balance=balance)
            elif step.why_not == NOTHING_ASKED:
                self.idle_steps, self.idle_epoch = self.idle_steps + 1, self.epoch + 1
            else:
                self.bad_steps += 1
            self.done += 1

        seen = self.step_views.of(images, places, self.epoch)
        self.stepper.step(seen, self.images.data.size, mark, count, places=places, progress=before / self.steps)
        self.sent, self.sent_steps = self.sent + ranks.bytes_sent() - sent, self.sent_steps + 1
        return shown

    def _begin_epoch(self) -> None:
        fresh = resume.pack(self) if self.plan.checkpoint is not None and self.epoch == 0 else None
        self.whole = False  # a refresh may move norm statistics: half of that is no state to save
        if isinstance(self.likelihood, Refreshing):
            with self.randomness.kept():
                self.likelihood.refresh(self.model, lambda: self.images.everything(self._failed))
        self.step_views.decide(self._failed)
        sync_randomness(self.randomness)
        if fresh is not None and self.plan.checkpoint is not None and ranks.rank() == 0:
            # A disk that cannot be written to shows before hours of work; but not before the likelihood has shown that
            # it can look at this network: a file from before that would bind the user to a misspelt one.
            fresh.write(self.plan.checkpoint)
        self.start = self.randomness.state()
        self.whole = True

    def _end_epoch(self) -> None:
        epoch = self.epoch + 1
        check_in_sync(self.model, f"after epoch {epoch}")
        surveyed = self.plan.keep_best or epoch >= self.plan.epochs - 1
        found = self.surveys.look(epoch, self._failed) if surveyed else None
        with uninterrupted():
            if found is not None:
                self.surveys.keep(epoch, *found)
            self.epoch, self.done, self.start, self.over = epoch, 0, None, False
        self._save()

    def _finish(self) -> None:
        self.surveys.put_best_back(self.epoch)
        self.finished = True
        self._save()

    def history(self) -> History:
        """Return what happened so far."""
        kept = self.surveys.best_epoch if self.plan.keep_best and self.finished else self.epoch
        verdict = self.surveys.verdict(kept) if self.finished else None
        return History(
            tuple(self.rows),
            dict(self.surveys.found),
            verdict,
            0 if self.surveys.put_back else kept,
            tuple(sorted(self.images.bad)),
            self.bad_steps,
            self.lone_batches,
            self.idle_steps,
            self.model,
            self.surveys.views,
            ranks.world_size(),
            self.sent // max(1, self.sent_steps),
            getattr(self.likelihood, "note", ""),
        )

    # What is saved and said on the way out ----------------------------------------------------------------------

    def _save(self) -> None:
        if self.plan.checkpoint is not None and ranks.rank() == 0:
            try:
                resume.pack(self).write(self.plan.checkpoint)
            except DataError:
                self.whole = False  # a disk that failed is not tried again on the way out
                raise

    def _failed(self, error: Exception) -> DataError:
        """Return the error for a data set that raised one."""
        where = f"epoch {self.epoch + 1}, after {self._batches_done()}"
        return DataError(
            f"unlabelled raised {type(error).__name__} ({error}) in {where}; adapt needs all of them. Mend the data "
            f"set. {self._advice('at the last whole step')}"
        )

    def _batches_done(self) -> str:
        return f"{self.done} of its {self.images.data.steps} batches"

    def _advice(self, where: str) -> str:
        """Return where model and checkpoint stand, and how to go on."""
        path = self.plan.checkpoint
        go_on = "With checkpoint=… a run could go on from there."
        if path is not None:
            go_on = f"Call adapt again with checkpoint={str(path)!r} to go on."
        if self.from_plain:
            return f"The network is as it was before the call. {go_on}"
        return f"The model stands {where} and can be used. {go_on}"
