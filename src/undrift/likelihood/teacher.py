"""Learn from an average of the network's own past over several views of every image."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from undrift._errors import OptionError
from undrift._types import Doubt, Step
from undrift.answer.prediction import entropy_of, histogram
from undrift.answer.views import AUTO, SAME, VIEWS, ReversibleView, ViewsInUse, disagreement, mirror_tells
from undrift.likelihood.averaged import Average
from undrift.likelihood.roid import by_the_batch, corrected_prior, likelihood_ratios, weigh
from undrift.likelihood.sure_images import SureImages
from undrift.posterior.batch import device_of
from undrift.posterior.domain_statistics import DomainStatistics, How
from undrift.posterior.outputs import rows
from undrift.posterior.perturbed import Perturbed

SHARPNESS = 3.0  # of the weights of the likelihood ratio, as ROID's
COMPARED = 64
"""Images of a batch to predict again without its statistics, at most."""


class Teacher:
    """Cross-entropy of noisy draws to an averaged teacher's predictions over symmetric views of the image.

        t_i = mean_v softmax f(θ̄, v(x_i))                        the teacher, without noise
        loss = mean_i −½ Σ_c t_ic (log p_ic + log p'_ic)          p a draw's answer to x_i, p' another's to v'(x_i)
        θ̄ ← θ̄ + (n / memory) (θ − θ̄)                             after each step on n images

    v runs over the image and its safe views, combined; v' is one of them at random. The answer combines the teacher and
    the mean network from before the step, with a corrected prior (see `Roid`) if norm layers use the batch:

        (1 − share) t_i + share · ½ (softmax f(θ, x_i) + softmax f(θ, v₁(x_i)))

    If no view is safe, v and v' are the image itself: two draws of the perturbation learn to agree with the average.
    With `replay`, the loss has one term more: mean −ln p_y of a draw on images answered confidently before, with label
    y. With `certainty`, another: certainty · Σ_i w_i SLR(p_i) / n, ROID's likelihood ratio (see `Roid`), where w_i is
    large for images whose target is certain and unlike the batch's mean.

    With `prior_images`, the teacher normalises by a posterior of norm statistics (see `DomainStatistics`), and can
    answer images without a step. A stream then decides itself which images share a step.

    Args:
        memory: images that the average remembers.
        views: names of views under which no label changes (`undrift.answer.views.VIEWS`), or "auto": those that pass a
            test without labels on the first images.
        most_views: how many of them are used at most, mirror images first; 1 saves two of four passes.
        other: use a second draw, on another view; without it a step takes half of the time.
        share: of the mean network in the answer; 0 saves two passes.
        replay: images to keep of those that the teacher was confident about; a step uses as many of them as it has
            images. They are part of a stream's state, so a saved stream then holds images. Answers per pixel keep none.
        certainty: weight of the likelihood ratio, which makes answers more confident and costs calibration.
        prior_images: N₀, the least weight of prior and domain statistics, in images; with 0 the teacher normalises by
            each batch alone, as the network does in a step.
        seed: of the choice of v'; without it torch's global generator gives one.
    """

    per_position = True
    answers_alone = True  # whatever a pass says, the answer is that of `_ask`

    def __init__(
        self,
        memory: int = 40_000,
        *,
        views: str | Sequence[str] = AUTO,
        most_views: int | None = None,
        other: bool = True,
        share: float = 0.5,
        replay: int = 0,
        certainty: float = 0.0,
        prior_images: int = 0,
        seed: int | None = None,
    ) -> None:
        wrong = [
            f"{name}={value!r} is not {needed}"
            for name, value, needed, right in (
                ("memory", memory, "a whole number from 1 up", memory >= 1),
                ("share", share, "a number from 0 to 1", 0 <= share <= 1),
                ("replay", replay, "a whole number from 0 up", replay >= 0),
                ("certainty", certainty, "a number from 0 up", 0 <= certainty < float("inf")),
                ("prior_images", prior_images, "a whole number from 0 up", prior_images >= 0),
            )
            if not right
        ]
        if wrong:
            raise OptionError(f"{'; '.join(wrong)}. Leave it out for the method's own.")
        self.memory, self.other, self.share, self.certainty = memory, other, share, certainty
        self._given, self._views = views, ViewsInUse(views, most_views)
        self.teacher, self.sure = Average(), SureImages(replay)
        self._random = torch.Generator().manual_seed(int(torch.randint(2**62, ())) if seed is None else seed)
        self._step: Step | None = None
        self._target = self._answer = torch.empty(0)
        self._images = 0
        self.statistics = DomainStatistics(prior_images)
        self.unattended = prior_images > 0
        self.new_domain = False  # whether the last step's images were of another domain than those before
        self._looked: tuple[Tensor, list[Tensor]] | None = None  # a batch, and the teacher's answers to its views

    @property
    def views(self) -> tuple[str, ...] | None:
        """Names of the views in use; None while a test has seen too few images to say."""
        return self._views.names if self._views.decided else None

    def __call__(self, logits: Tensor, step: Step) -> Tensor:
        """Return the loss of one draw; the first draw of a step asks the teacher."""
        if step is not self._step:
            self._views.look(step.images, step.mean_logits)
        sides = self._views.of(step.images)
        if step is not self._step:
            self._ask(sides, step)
            if self.sure.most and logits.ndim == 2:
                self.sure.offer(step.images, self._target, logits)
        loss = _to(self._target, logits)
        if self.certainty:
            loss = loss + self.certainty * self._ratios(logits)
        if self.other:
            side = sides[int(torch.randint(len(sides) - 1, (), generator=self._random)) + 1 if len(sides) > 1 else 0]
            loss = 0.5 * (loss + _to(self._target, side.answer(step.drawn_logits(side(step.images)))))
        if self.sure.most and (again := self.sure.some(len(step.images), self._random)) is not None:
            loss = loss + F.cross_entropy(step.drawn_logits(again[0].to(step.images.dtype)), again[1])
        return loss

    def _ratios(self, logits: Tensor) -> Tensor:
        """Return Σ_i w_i SLR(p_i) / n, over positions too where each has a class."""
        target, logits = rows(self._target.to(logits.dtype)), rows(logits)
        weights, kept = weigh(target.clamp_min(torch.finfo(target.dtype).tiny).log(), target.mean(0), SHARPNESS)
        return (weights * kept * likelihood_ratios(logits)).mean()

    @torch.no_grad()
    def _ask(self, sides: list[ReversibleView], step: Step) -> None:
        """Find the target and the answer of a step."""
        self._step, self._images = step, len(step.images)
        looked, self._looked = self._looked, None
        if looked is None or looked[0] is not step.images or len(looked[1]) != len(sides):
            looked = step.images, self._told(step.model, step.images, sides, "batch")
        answer = self._target = torch.stack(looked[1]).mean(0)
        if self.share:
            own = sides[:2]
            mean = _mean_softmax((side.answer(step.mean_logits(side(step.images))) for side in own), len(own))
            answer = torch.lerp(answer, mean, self.share)
        self._answer = _with_prior(step.model, answer)

    def _told(self, model: Perturbed, images: Tensor, sides: Sequence[ReversibleView], how: How) -> list[Tensor]:
        """Return the teacher's softmax of each view of a batch; all views are normalised alike."""
        self.teacher.start(model)
        posterior = self.supports(model)
        told = []
        for number, side in enumerate(sides):
            with self.statistics.answering(model, "again" if number else how) if posterior else nullcontext():
                told.append(side.answer(self.teacher.logits(model, side(images))).softmax(1))
        return told

    # Images that make no step ------------------------------------------------------------------------------------

    def supports(self, model: Perturbed) -> bool:
        """Return whether it answers images that make no step, and tells which make none: by a posterior."""
        return self.unattended and self.statistics.start(model)

    @torch.no_grad()
    def answer_alone(self, model: Perturbed, images: Tensor, counted: bool) -> Tensor:
        """Return the teacher's probabilities for images that make no step.

        Args:
            counted: whether the images have a say in the statistics that normalise them.
        """
        told = self.each_alone(model, images, self._views.of(images), counted)
        return _with_prior(model, torch.stack(told).mean(0)).softmax(1)

    @torch.no_grad()
    def each_alone(
        self, model: Perturbed, images: Tensor, views: Sequence[ReversibleView], counted: bool
    ) -> list[Tensor]:
        """Return the teacher's probabilities for each view of images by itself."""
        self._looked = None
        return self._told(model, images, views, "batch" if counted else "kept")

    @torch.no_grad()
    def doubt(self, model: Perturbed, images: Tensor, least: float = -1.0, most: float = 1.0) -> Doubt:
        """Return what speaks for images being no sample of their domain.

        A batch of one class has statistics that take out what tells it from others: with them its labels are many,
        answers less sure, and those of views of an image disagree. On a hard domain, answers are unsure and views
        disagree, too, but its own statistics make that no worse. What was asked is kept for the step that follows.

        Args:
            least: if views disagree on no more than this share of the images, the other signs do not matter, and the
                pass that they take is saved.
            most: likewise if more than this part of the labels' entropy is left with the last layers' kept statistics.
        """
        if images.ndim != 4:
            return Doubt(0.0, 0.0, 0.0, 0.0)
        # A view may be looked through before it is known to be safe: no label is taken from it.
        sides = self._views.of(images)
        shift = VIEWS["shift"]
        asked = sides if len(sides) > 1 else [SAME, shift] if self.views is not None else [SAME, VIEWS["mirror"], shift]
        counted = self._told(model, images, asked, "batch")
        self._looked = images, counted[: len(sides)]
        place = 1
        if len(asked) > len(sides) + 1:  # neither is known to be safe
            mirrored, shifted = (disagreement(counted[0], seen) for seen in counted[1:])
            place = 1 if mirror_tells(mirrored, shifted) else 2
        few = slice(None, None, -(-len(images) // COMPARED))
        views = disagreement(counted[0][few], counted[place][few]).mean()
        # All that the host has to know of an ordinary batch before its step, in one transfer.
        share, counted_entropy, *self.statistics.heard = _numbers(views, _spread(counted[0][few]), self.statistics.told)
        if share <= least:
            return Doubt(share, 0.0, counted_entropy, counted_entropy)
        (kept,) = self._told(model, images[few], [SAME], "kept")
        kept_entropy = float(_spread(kept))
        if kept_entropy > most * counted_entropy:
            return Doubt(share, 0.0, counted_entropy, kept_entropy)
        # A small shift, whatever views are in use: unsafe ones change labels under any statistics.
        (kept_shifted,) = self._told(model, images[few], [shift], "again")
        own, own_shifted = (told[few] for told in self._told(model, images, [SAME, shift], "batch"))
        worse = _trust(kept, kept_shifted) - _trust(own, own_shifted)
        return Doubt(share, float(worse), counted_entropy, kept_entropy)

    def answer(self, logits: Tensor) -> Tensor:  # noqa: ARG002
        """Return the log-probabilities of the answer."""
        return self._answer

    def follow(self, model: Perturbed) -> None:
        """Move the teacher towards the network."""
        self.teacher.follow(model, max(0.0, 1 - self._images / self.memory))
        self.sure.keep()
        self._step = None
        self.new_domain = self.statistics.take()

    def deployed(self, model: Perturbed) -> AbstractContextManager[Perturbed]:
        """Give the model the teacher's weights for the length of a `with` block."""
        return self.teacher.deployed(model)

    def state_dict(self) -> dict[str, Any]:
        """Return the teacher, the test of the views, the images to look at again, and the random choices' state."""
        random = self._random.get_state()
        return {
            **self.teacher.state_dict(),
            "views": self._views.state(),
            "random": random,
            **({"statistics": self.statistics.state_dict()} if self.statistics.layers else {}),
            **({"sure": self.sure.state()} if self.sure.most else {}),
        }

    def load_state_dict(self, state: dict[str, Any], model: Perturbed) -> None:
        """Go on from a state."""
        self.teacher.load_state_dict(state, model)
        self._views.load(state["views"])
        self._random.set_state(state["random"].cpu())
        self.sure.load(state.get("sure", {}), device_of(model))
        self.statistics.load_state_dict(state.get("statistics", {}), model)
        self._step = self._looked = None

    def __repr__(self) -> str:
        replay = f", replay={self.sure.most}" if self.sure.most else ""
        prior = f", prior_images={self.statistics.prior}" if self.statistics.prior else ""
        which = f"memory={self.memory}, views={self._given!r}, other={self.other}, share={self.share}"
        return f"Teacher({which}{replay}{prior})"


def _to(target: Tensor, logits: Tensor) -> Tensor:
    return -(target.to(logits.dtype) * logits.log_softmax(1)).sum(1).mean()


def _spread(probs: Tensor) -> Tensor:
    """Return the entropy of the labels of a batch."""
    return entropy_of(histogram(probs.argmax(1), probs.shape[1])[None] / len(probs))


def _trust(told: Tensor, of_view: Tensor) -> Tensor:
    """Return how sure the answers to a batch are, less the share of images whose view has another label."""
    return told.amax(1).mean() - disagreement(told, of_view).mean()


def _numbers(*found: Tensor) -> list[float]:
    """Return scalars and vectors as numbers, in one transfer from their device."""
    return torch.cat([each.flatten().to(found[0]) for each in found]).tolist()


def _with_prior(model: Perturbed, answer: Tensor) -> Tensor:
    """Return log-probabilities under a corrected prior: that of images, as pixels are truly of unequal classes.

    Where no layer normalises by the batch, what a drifted network predicts on average is its own bias, which a prior
    would make worse.
    """
    logits = answer.clamp_min(torch.finfo(answer.dtype).tiny).log()
    corrected = logits.ndim == 2 and any(by_the_batch(policy) for policy in model.norms)
    return logits + corrected_prior(logits).log() if corrected else logits


def _mean_softmax(logits: Any, count: int) -> Tensor:
    total: Tensor = sum(each.softmax(1) for each in logits)
    return total / count
