"""Notice, without labels, that a stream answers worse than the source network, and go back.

One batch in ten is looked at: the source network and the adapted one answer its images and a view of each, a mirror
image or one moved a little. Two things speak against the adapted network:

    it is less consistent:   mean ½ Σ_c |p(c | x) − p(c | view of x)| exceeds the source's by 0.1 and two standard errors
    it has collapsed:        the entropy of its predicted classes is less than half of the source's, on the same images

What is judged worse is answered by the source network, and the last state that was judged sound is put back. If that is
no better, the start state is; if that is no better either, the source network answers for a while, and nothing is
learned. Then learning starts again from there.

What it cannot see: an adapted network that is wrong consistently and about many classes. It compares the two networks
on one in ten images only, so a short lapse may pass unseen.
"""

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from undrift.answer.forward import forward
from undrift.answer.prediction import Prediction, entropy_of, histogram
from undrift.answer.views import VIEWS
from undrift.loop.learning import Learning
from undrift.posterior.layers import evaluating

EVERY = 10
"""One batch in so many is looked at; all of them while the judgement is open."""

WINDOW, LEAST = 200, 32
"""Images that a judgement looks back on, and those that it needs."""

MARGIN, ERRORS = 0.1, 2.0
"""By how much, and by how many standard errors, the adapted network has to be less consistent."""

CLASS_WINDOW, LEAST_RATIO, LEAST_SOURCE = 10, 0.5, 0.25
"""Images per class that the histograms remember; the least ratio of their entropies, and of the source's to log C."""

GOOD_EVERY = 2000
"""Images between two copies of a sound state."""

REST, LONGEST_REST = 1000, 64_000
"""Images that the source network answers when nothing else helps; twice as many each time."""


class Guard:
    """Looks at one batch in ten, and goes back where the adapted network is judged worse than its source.

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
        self._forget()

    def __call__(self, images: Tensor, sound: Tensor | None) -> Prediction:
        """Return the answer to a batch: that of the stream, or the source network's.

        Args:
            images: finite ones; `sound` says for each image of the user's batch whether it is among them.
        """
        if self.resting:
            prediction = Prediction.of(self._source(images), None, sound)
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
        source = self._look(images, own)
        why, open_still = self._judge()
        self._skip = 0 if open_still else (EVERY - 1) * len(images)
        if why is None:
            if not open_still:
                self._strikes, self._rest = 0, REST
                if self._since_good >= GOOD_EVERY:
                    self._good, self._since_good = self.online.learned(), 0
            return prediction
        self._go_back(why)
        return Prediction.of(source, None, sound)

    @torch.no_grad()
    def _source(self, images: Tensor) -> Tensor:
        # off() restores the flags from before `perturb`: with dropout, if the network was in train mode.
        with self.model.off() as net, evaluating(net):
            return forward(self.model, images).softmax(1)

    @torch.no_grad()
    def _look(self, images: Tensor, own: Tensor) -> Tensor:
        """Take in how both networks answer a batch; return the source's answer."""
        view = VIEWS[self._view()] if images.ndim == 4 else None
        source = self._source(images)
        if view is not None:
            adapted = self.learning.views_alone(images, view, own)
            apart = [
                0.5 * (one - other).abs().sum(1).reshape(len(one), -1).mean(1)
                for one, other in (adapted, (source, view.answer(self._source(view(images)))))
            ]
            less = (apart[0] - apart[1]).nan_to_num(1.0).float().cpu()
            self._less = torch.cat([self._less, less])[-max(WINDOW, len(less)) :]
        window = CLASS_WINDOW * source.shape[1]
        # A batch larger than the window counts whole; older images fade with their distance.
        kept = max(0.0, 1 - len(images) / window)
        new = torch.stack([histogram(probs.argmax(1), probs.shape[1]) for probs in (own, source)]).cpu()
        self._classes = new if self._classes is None else kept * self._classes + new
        return source

    def _view(self) -> str:
        names = getattr(self.online.likelihood, "views", None) or self.online.views.names
        return "mirror" if "mirror" in names else "shift"

    def _judge(self) -> tuple[str | None, bool]:
        """Return what speaks against the adapted network, and whether more has to be seen to say."""
        if self._classes is None:
            return None, True
        seen = float(self._classes[1].sum())
        adapted, source = entropy_of(self._classes / self._classes.sum(1, keepdim=True).clamp_min(1)).tolist()
        # A source that knows one class itself says nothing.
        telling = seen >= CLASS_WINDOW * self._classes.shape[1] / 2 and source > LEAST_SOURCE * math.log(len(self._classes[0]))
        if telling and adapted < LEAST_RATIO * source:
            return f"collapsed: the entropy of its classes is {adapted:.2f}, the source network's {source:.2f}", True
        if len(self._less) < LEAST:
            return None, False
        mean, error = float(self._less.mean()), float(self._less.std()) / len(self._less) ** 0.5
        if mean > MARGIN + ERRORS * error:
            found = f"{mean:.2f} ± {error:.2f}"
            return f"less consistent: views of an image differ more than for the source network, by {found}", True
        return None, mean > MARGIN

    def _go_back(self, why: str) -> None:
        report, good = self.online.report, self._good
        self._forget()
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

    def _forget(self) -> None:
        self._less = torch.empty(0)
        self._classes: Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return what was seen, and the last sound state."""
        return copy.deepcopy(
            {
                "less": self._less,
                "classes": self._classes,
                "good": self._good,
                "stands": (self.resting, self._rest, self._skip, self._strikes, self._since_good),
            }
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        state = copy.deepcopy(dict(state))
        self._less, self._classes, self._good = state["less"].cpu(), state["classes"], state["good"]
        self._classes = None if self._classes is None else self._classes.cpu()
        self.resting, self._rest, self._skip, self._strikes, self._since_good = state["stands"]
