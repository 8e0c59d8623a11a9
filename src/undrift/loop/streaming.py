"""Iterate over a stream: answer each batch, learn from it, and update the report."""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from undrift._errors import PerturbationMismatch
from undrift._types import SelfPaced
from undrift.answer.forward import blank_logits, finite_rows
from undrift.answer.prediction import Prediction, entropy_and_balance_of
from undrift.judge.accuracy import Helping
from undrift.judge.page.compare import source_answer
from undrift.judge.page.document import write
from undrift.judge.page.pages import of_stream
from undrift.judge.page.recording import Recording
from undrift.loop.balanced import BalancedGather
from undrift.loop.gather import Gather, warn_of_single
from undrift.loop.guard import Guard
from undrift.loop.health import Health
from undrift.loop.learning import Learning
from undrift.loop.online import OnlineSteps
from undrift.loop.pacing import Pacing
from undrift.loop.setup import BatchPlan, refuse_off
from undrift.loop.stream_report import StreamReport
from undrift.loop.switching import Switching
from undrift.packs.file import save
from undrift.posterior.batch import device_of, images_of, to_device
from undrift.posterior.kept_statistics import warn_of_mean
from undrift.posterior.layers import evaluating
from undrift.posterior.model_lock import turn
from undrift.posterior.perturbed import Perturbed
from undrift.system.progress import Bar

FIRST_COMPARED, COMPARED_EVERY = 8, 8
"""A recorded stream asks the source network about so many batches at first, and then about one in so many."""


class Stream(Iterator[Prediction]):
    """An iterator over the answers of a stream; made by `stream`.

    `state_dict()`, taken between two batches, lets another stream resume exactly there. After a `break`, an error or
    Ctrl-C the network is usable, and `next()` takes the next batch. Closing only stops the progress bar.

    Attributes:
        model: the network that is adapted.
        online: makes the steps, and holds likelihood and optimiser.
        pacing: decides which images to learn from together; None where the user has, or the likelihood cannot tell.
        guard: goes back where the network has become worse than its source; None in a stream without.
        switching: knows the domains of a stream with packs; None in a stream without.
        recording: what `page` shows besides the counts, from `record` on; None before.
    """

    def __init__(
        self,
        online: OnlineSteps,
        batches: Iterator[Any],
        plan: BatchPlan,
        bar: Bar | None,
        watched: ExitStack,
    ) -> None:
        self.online, self.model, self.bar = online, online.model, bar
        self._shown = ExitStack()
        self.answer, self.episodic, self.gather = plan.answer, plan.episodic, plan.gather
        self.switching = None if plan.packs is None else Switching(online, plan.packs)
        likelihood = online.likelihood
        self_paced = likelihood if isinstance(likelihood, SelfPaced) and not plan.episodic else None
        by_itself = self_paced is not None and self_paced.supports(self.model)
        as_asked = plan.gather is not None or self.model.options.stream_split is not None
        self.pacing = Pacing(online.report) if by_itself and not as_asked else None
        self._learning = Learning(online, plan.answer, plan.gather, self.pacing)
        guarded = self_paced is not None and self_paced.unattended if plan.guard is None else plan.guard
        self.guard = Guard(self._learning) if guarded else None
        self._health = Health()
        self._numbers = online.latest  # of the last batch with a finite image, as is its answer
        self._answered: Prediction | None = None
        self._single = 0  # batches of one image in a row
        self._batches = batches
        self.recording: Recording | None = None
        self._names: Callable[[], Sequence[str]] | None = None
        self._watched = watched.pop_all()  # what is attached for the likelihood; the caller closes it after an error

    @property
    def report(self) -> StreamReport:
        """What was seen, skipped and reset so far."""
        return self.online.report

    @property
    def health(self) -> Helping | None:
        """Whether the answers given are right more often than the source network's would be; None before any.

        Estimated without labels from a sample of at most 256 images, most of them among the latest thousand. Reading
        this costs up to eight forward passes of the sample, in batches as large as the stream's largest or of 16; the
        stream itself makes none for it.
        """
        names = self.online.views.names if self.online.views.decided else None
        with turn(self.model), torch.inference_mode(False), self.answering() as model:
            return self._health.of(model, names or None)

    @property
    def latest(self) -> dict[str, float]:
        """Loss (likelihood + KL), likelihood, KL, entropy and class balance of the last batch.

        The balance is the entropy of the predicted classes over log C. Reading this waits for a GPU.
        """
        entropy, balance = (math.nan, math.nan) if self._answered is None else entropy_and_balance_of(self._answered)
        return self._numbers | {"entropy": entropy, "balance": balance}

    def __next__(self) -> Prediction:
        try:
            with turn(self.model):
                refuse_off(self.model, "stream")  # before a batch is taken that would get no answer
            images = images_of(next(self._batches))
            # Callers often predict under no_grad or inference_mode; a step needs gradients all the same.
            with turn(self.model), torch.inference_mode(False), torch.enable_grad():
                images = to_device(images.clone() if images.is_inference() else images, self.model)
                prediction = self._answer(images)
        except BaseException:  # the end, an error, Ctrl-C: the terminal gets its cursor back
            self.close()
            raise
        self.report.batches += 1
        self.report.images += len(prediction)
        self._state_facts()
        self._single = self._single + 1 if len(prediction) == 1 or self._single >= 2 else 0
        # At the second in a row, as a single one may end a folder.
        if self._single == 2 and self.gather is None and self.pacing is None:
            warn_of_single(self.model)
        if self.recording is not None:
            self._record(self.recording, images, prediction)
        done = self.report.batches
        # At the 1st, 2nd, 4th, 8th… batch: looking waits for a GPU, and σ grows slowly.
        if self.answer == "samples" and not self.model.options.test_samples and not done & (done - 1):
            warn_of_mean(self.model)
        if self.bar is not None:
            if self.report.batches == 1:
                self._shown.enter_context(self.bar)
            self.bar.say(self._doing)
            latest = self.latest
            shown = {name: latest[name] for name in ("loss", "entropy", "balance")}
            self.bar.advance(images=f"{self.report.images:,}", steps=f"{self.report.steps:,}", **shown)
        return prediction

    def close(self) -> None:
        """Stop the progress bar. The network needs no closing."""
        self._shown.close()

    def remove(self) -> nn.Module:
        """End the stream and return the network as it was before it, with nothing attached."""
        self.close()
        self._watched.close()
        return self.model.remove()

    @contextmanager
    def answering(self) -> Iterator[Perturbed]:
        """Give the model with the weights that answered, for the length of a `with` block: CoTTA's teacher's.

        Of all other methods they are the model's own.
        """
        with self._learning.answering() as model:
            yield model

    def __repr__(self) -> str:
        return f"<Stream of {type(self.model.net).__name__}: {self.report}>"

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """Return all that a stopped stream needs to resume exactly where it stood; `torch.save` takes it."""
        with turn(self.model):
            state = self.online.state_dict()
            if self.recording is not None:
                state |= {"recording": self.recording.state_dict()}
            if self.switching is not None:
                state |= {"switching": self.switching.state_dict()}
            if self.pacing is not None:
                state |= {"pacing": self.pacing.state()}
            if self.guard is not None:
                state |= {"guard": self.guard.state_dict()}
            return state if self.gather is None else state | self.gather.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state, learning rate included; this stream's batches are those still to come."""
        with turn(self.model):
            self._refuse_other(state)
            self.online.load_state_dict(state)
            if self.pacing is not None:
                self.pacing.load(state["pacing"], device_of(self.model))
            if self.guard is not None:
                self.guard.load_state_dict(state["guard"])
            if self.gather is not None:
                self.gather.load(state, device_of(self.model))
            if self.switching is not None:
                self.switching.load_state_dict(state["switching"])
            if self.recording is not None and "recording" in state:
                self.recording.load_state_dict(state["recording"])
            if self.report.images:  # a stream that was stopped at its end has no next batch
                self._state_facts()

    @property
    def _doing(self) -> str:
        if self.guard is not None and self.guard.resting:
            return "stream (the source answers)"
        return "stream (classes in runs)" if self._learning.runs else "stream"

    def _state_facts(self) -> None:
        self.model.facts = {"images": self.report.images - self.report.skipped}

    @property
    def domain(self) -> str | None:
        """The name of the domain that a stream with packs is in: a pack's, or "new-1", …; None without packs."""
        return None if self.switching is None else self.switching.current

    def keep(self, path: str | os.PathLike[str], name: str | None = None) -> str:
        """Save what was learned of the current domain as a pack, and return its name.

        The stream knows the domain by that name from now on. With packs, the file holds what a router compares.

        Args:
            path: of the pack.
            name: of the domain. Default: the file's name without its ending.
        """
        with turn(self.model):
            name = Path(path).stem if name is None else name
            if self.switching is not None:
                self.switching.keep(name)
            with self.answering() as model:
                save(model, path, name=name)
        return name

    def record(self, names: Callable[[], Sequence[str]] | None = None) -> Recording:
        """Keep from now on what `page` shows: a curve, confidences, a few images; at most 1 MB, however long it runs.

        The source network also answers the first batches and every eighth after them, for comparison. Answers and
        steps are the same bit for bit. On a GPU each batch waits for its answers.

        Args:
            names: gives the names of the images of the batch at hand, such as their files.
        """
        self._names = names
        if self.recording is None:
            self.recording = Recording(self.model.preprocess, self.model.classes)
        return self.recording

    def page(self, path: str | os.PathLike[str]) -> int:
        """Write an HTML page about the stream so far, whole or not at all, and return its size in bytes.

        Without `record` it has the counts only.
        """
        switches = () if self.switching is None else self.switching.switches
        with turn(self.model):
            page = of_stream(self.report, self.model, self.recording, switches, self.health)
        return write(path, page)

    def _record(self, recording: Recording, images: Tensor, prediction: Prediction) -> None:
        recording.add(images, prediction, names=None if self._names is None else self._names())
        if self.report.batches <= FIRST_COMPARED or self.report.batches % COMPARED_EVERY == 0:
            recording.compare(source_answer(self.model, images), prediction)

    def _answer(self, images: Tensor) -> Prediction:
        if self.switching is not None and self.switching(images):
            for waiting in (self.gather, self.pacing):
                if waiting is not None:
                    waiting.forget(images)  # of the domain before
            if self.guard is not None:
                self.guard.forget()
        split = self.model.options.stream_split
        if split is None or len(images) <= split:
            return self._part(images, 0)
        parts = images.split(split)
        return Prediction.cat(self._part(part, number * split) for number, part in enumerate(parts))

    def _part(self, images: Tensor, place: int) -> Prediction:
        """Return the answer to images that make a step together; `place` is that of the first in the batch."""
        if self.episodic:
            self.online.reset()
        finite = finite_rows(images)
        sound = None if bool(finite.all()) else finite
        kept = images if sound is None else images[sound]
        if len(kept) == 0:
            prediction = Prediction.unknown(len(images), blank_logits(self.model, images))
            self.report.miss("no finite image")
        else:
            # No dropout, because the noise takes its place; only norm statistics move, as in training.
            with evaluating(self.model):
                prediction = (self.guard or self._learning)(kept, sound)
            self._numbers, self._answered = self.online.latest, prediction
            self._health.add(kept, prediction.probs if sound is None else prediction.probs[sound])
        if sound is not None:
            skipped = (~sound).nonzero()[:, 0].tolist()
            self.report.skipped += len(skipped)
            self.report.skipped_at.extend(self.report.images + place + found for found in skipped)
        return prediction

    def _refuse_other(self, state: Mapping[str, Any]) -> None:
        """Raise unless the state is of a stream that gathers, switches, paces and guards as this one does."""
        before, now = _gathering(state.get("gather"), state.get("balanced", False)), _gathering_of(self.gather)
        if before != now:
            raise PerturbationMismatch(
                f"the state is of a stream with {before}, and this one has {now}; a stream resumes with the same. "
                "Start it as that one was, or start a new stream."
            )
        kept = {"memories" if state.get("balanced") else "waiting"} if self.gather is not None else set()
        if missing := kept - state.keys():
            raise PerturbationMismatch(
                f"the state has no {missing.pop()}; a stream resumes from what Stream.state_dict() returned. Give "
                "that, or start a new stream."
            )
        if (self.switching is None) is ("switching" in state):
            raise PerturbationMismatch(
                f"the state is of a stream {'with' if self.switching is None else 'without'} packs; a stream "
                "resumes as it was. Start it as that one was, or start a new stream."
            )
        for part, now_on in (("pacing", self.pacing is not None), ("guard", self.guard is not None)):
            if now_on and part not in state:
                raise PerturbationMismatch(
                    f"the state is of a stream without {part}, and this one has one; a stream resumes as it was. "
                    "Start it as that one was, or start a new stream."
                )


def _gathering_of(gather: Gather | BalancedGather | None) -> str:
    return _gathering(None, False) if gather is None else _gathering(gather.least, gather.balanced)


def _gathering(gather: int | None, balanced: bool) -> str:
    """Return how a stream gathers, in its arguments."""
    return f"gather={gather}" + ", balanced=True" * balanced
