"""Detect, without labels, that a stream answers worse than the source network, and restore an earlier state.

On one batch in twelve, the source network and the adapted one both answer the images and a view of each (a mirror image
or a shifted one). Two signs speak against the adapted network:

    it is less consistent:  views of more than twice as many images as the source's have another label, by a margin
    it has collapsed:       the entropy of its predicted classes is less than half of the source's, on the same images;
                            not asked where classes come in runs, as the better network says fewer then

If the adapted network is judged worse, the source network answers the batch, and the last state that was judged sound
is restored. If that is no better, the start state is restored; if that is no better either, the source network answers
for a while, and nothing is learned. Then learning starts again from there.

The guard cannot detect an adapted network that is consistently wrong about many classes. In a stream that detects runs
itself, it does not ask for consistency where the source answers with a single class. It compares the networks on one
batch in twelve only, so it may miss a short failure.
"""

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from undrift.answer.prediction import Prediction, entropy_of, histogram
from undrift.answer.views import VIEWS, ReversibleView, SafeViews, disagreement, mirror_tells
from undrift.loop.learning import Learning
from undrift.posterior.state import keeping_noise

EVERY = 12
"""Check one batch in so many; all of them while there is doubt."""

WINDOW, LEAST = 200, 32
"""Images that a judgement looks back on, and those that it needs."""

RATIO, MARGIN, ERRORS = 2.0, 0.15, 2.0
"""The adapted network has to be this many times less consistent, and by how much and how many standard errors more.

A source network that answers a hard domain with few classes is consistent for free."""

CLASS_WINDOW, LEAST_RATIO, LEAST_SOURCE = 10, 0.5, 0.25
"""Images per class that the histograms remember; the least ratio of their entropies, and of the source's to log C: a
source that says one class says nothing about the adapted network."""

GOOD_EVERY = 2000
"""Images between two copies of a sound state."""

REST, LONGEST_REST = 1000, 64_000
"""Images that the source network answers when nothing else helps; twice as many each time."""


class Guard:
    """Looks at one batch in twelve, and goes back where the adapted network is judged worse than its source.

    Attributes:
        resting: images that the source network still answers before learning starts again.
    """

    def __init__(self, learning: Learning) -> None:
        self.learning, self.online, self.model = learning, learning.online, learning.model
        self.resting = 0
        self._rest = REST
        self._skip = 0  # images until the next look
        self._strikes = 0  # judgements "worse" since the last sound one
        self._since_good = GOOD_EVERY
        self._good: dict[str, Any] | None = None
        self._less, self._classes, self._known = _nothing()
        self._safe = SafeViews(("mirror",))  # by the source network's answers

    def __call__(self, images: Tensor, sound: Tensor | None) -> Prediction:
        """Return the answer to a batch: that of the stream, or the source network's.

        Args:
            images: finite ones; `sound` says for each image of the user's batch whether it is among them.
        """
        if self.resting:
            prediction = Prediction.of(self.learning.source(images), None, sound)
            self.resting = max(0, self.resting - len(images))
            if not self.resting:
                self.online.report.event("learning again", "from the start state, after a rest")
            return prediction
        prediction = self.learning(images, sound)
        self._since_good += len(images)
        if self._skip > 0:
            self._skip -= len(images)
            return prediction
        own = prediction.probs if sound is None else prediction.probs[sound]
        with keeping_noise(self.model.key):
            source = self._look(images, own)
        why, sound_state = self._judge()
        # While there is doubt, every batch is checked.
        self._skip = 0 if why is not None or sound_state is False else (EVERY - 1) * len(images)
        if why is None:
            if sound_state:
                self._strikes, self._rest = 0, REST
                if self._since_good >= GOOD_EVERY:
                    self._good, self._since_good = self.online.learned(), 0
            return prediction
        self._go_back(why)
        return Prediction.of(source, None, sound)

    @torch.no_grad()
    def _look(self, images: Tensor, own: Tensor) -> Tensor:
        """Take in how both networks answer a batch; return the source's answer."""
        source = self.learning.source(images)
        if images.ndim == 4:
            name = "shift" if self._safe.passed == () else "mirror"
            apart = self._apart(images, source, VIEWS[name])
            speaks = bool((apart[0] - RATIO * apart[1]).mean() > MARGIN)
            if name == "mirror" and speaks:
                shifted = self._apart(images, source, VIEWS["shift"])
                apart = apart if mirror_tells(apart[0], shifted[0]) else shifted
            less = (apart[0] - RATIO * apart[1]).nan_to_num(1.0)
            self._less = torch.cat([self._less, less.float().cpu()])[-max(WINDOW, len(less)) :]
        # A source that answers with one class may see a run of it. A stream that detects runs knows that it does not;
        # pixels may well be of one class.
        if self.learning.pacing is not None and source.ndim == 2:
            self._known = _faded(self._known, histogram(source.argmax(1), source.shape[1])[None], len(images), WINDOW)
        if self.learning.runs:  # few classes are right
            return source
        new = torch.stack([histogram(probs.argmax(1), probs.shape[1]) for probs in (own, source)])
        self._classes = _faded(self._classes, new, len(images), CLASS_WINDOW * source.shape[1])
        return source

    def _apart(self, images: Tensor, source: Tensor, view: ReversibleView) -> tuple[Tensor, Tensor]:
        """Return for each image how much its view disagrees, by the adapted network and by the source."""
        seen = view.answer(self.learning.source(view(images)))
        if view is VIEWS["mirror"] and self._safe.passed is None:
            self._safe.look(source.log(), "mirror", seen.log())
        return disagreement(*self.learning.views_alone(images, view)), disagreement(source, seen)

    def _judge(self) -> tuple[str | None, bool | None]:
        """Return what speaks against the adapted network, and whether it is sound; None where too little was seen."""
        if self._classes is not None:
            seen = float(self._classes[1].sum())
            adapted, source = _spread(self._classes)
            count = self._classes.shape[1]
            telling = seen >= CLASS_WINDOW * count / 2 and source > LEAST_SOURCE * math.log(count)
            if telling and adapted < LEAST_RATIO * source:
                of = f"about {math.exp(adapted):.1f} classes, the source network's of {math.exp(source):.1f}"
                return f"collapsed: its answers to the latest images are of {of}", False
        if len(self._less) < LEAST:
            return None, None
        if self._known is not None and _spread(self._known)[0] <= LEAST_SOURCE * math.log(self._known.shape[1]):
            return None, None  # consistent for free
        mean, error = float(self._less.mean()), float(self._less.std()) / len(self._less) ** 0.5
        if mean > MARGIN + ERRORS * error:
            often = "another view of an image changes its label more than twice as often as the source network's"
            return f"less consistent: {often}, by {100 * mean:.0f} ± {100 * error:.0f} % of the images", False
        return None, mean <= MARGIN

    def forget(self) -> None:
        """Judge anew: the network went to another domain, and its last sound state is not of that."""
        self._less, self._classes, self._known = _nothing()
        self._good, self._since_good = None, GOOD_EVERY
        self._skip = self._strikes = 0

    def _go_back(self, why: str) -> None:
        report, good = self.online.report, self._good
        self._less, self._classes, self._known = _nothing()
        self._strikes += 1
        if self._strikes == 1 and good is not None:
            self.online.go_on_from(good)
            report.event("went back", f"to the last sound state; {why}")
            report.reset(why.partition(":")[0])
            return
        self._good, self._since_good = None, GOOD_EVERY
        self.online.start_again(why.partition(":")[0])
        if self._strikes <= 2:
            report.event("went back", f"to the start state; {why}")
            return
        self.resting, self._rest = self._rest, min(2 * self._rest, LONGEST_REST)
        report.event("source answers", f"for {self.resting:,} images; {why}")

    def state_dict(self) -> dict[str, Any]:
        """Return what was seen, and the last sound state."""
        return copy.deepcopy(
            {
                "less": self._less,
                "classes": self._classes,
                "known": self._known,
                "safe": self._safe.state(),
                "good": self._good,
                "stands": (self.resting, self._rest, self._skip, self._strikes, self._since_good),
            }
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        state = copy.deepcopy(dict(state))
        self._less, self._good = state["less"].cpu(), state["good"]
        self._classes, self._known = (None if state[n] is None else state[n].cpu() for n in ("classes", "known"))
        self._safe.load(state["safe"])
        self.resting, self._rest, self._skip, self._strikes, self._since_good = state["stands"]


def _nothing() -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return what was seen before the first look: how much less consistent, classes of both, and of the source."""
    return torch.empty(0), None, None


def _faded(before: Tensor | None, new: Tensor, images: int, window: int) -> Tensor:
    """Return histograms with those of new images: a batch counts whole, older images fade with their distance."""
    return new.cpu() if before is None else max(0.0, 1 - images / window) * before + new.cpu()


def _spread(counts: Tensor) -> list[float]:
    """Return the entropy of each histogram."""
    return entropy_of(counts / counts.sum(1, keepdim=True).clamp_min(1)).tolist()
