"""Record a run for its page: counts, a curve and a few images, of bounded size."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from undrift.answer.prediction import Prediction
from undrift.judge.page.thumbnail import can_be_shown, thumbnail
from undrift.posterior.batch import images_of

if TYPE_CHECKING:
    from undrift.images.preprocess import Preprocess

BINS = 20
"""Of the confidence histograms."""

POINTS = 120
"""Points of a curve that stay: at twice as many, neighbours become one."""

SHOWN = 6
"""Images of each kind: the surest, the least sure, the surest mistakes."""


@dataclass
class AnswerCounts:
    """What is kept of one network's answers.

    Attributes:
        images: that got an answer.
        unanswered: images without one.
        confidence: how many images have a largest probability in each of twenty bins.
        classes: how often each class was the answer.
        sure: sum of the largest probabilities; `entropy`: of the entropies, in nats.
    """

    images: int = 0
    unanswered: int = 0
    confidence: list[int] = field(default_factory=lambda: [0] * BINS)
    classes: list[int] = field(default_factory=list)
    sure: float = 0.0
    entropy: float = 0.0

    def add(self, found: Prediction) -> None:
        """Count the answers of one batch."""
        confidence, answered = _by_image(found.probs.amax(1)), _by_image((found.label >= 0).double()) > 0
        self.unanswered += int((~answered).sum())
        kept = confidence[answered]
        if not len(kept):
            return
        self.images += len(kept)
        places = (kept * BINS).ceil().long().sub(1).clamp(0, BINS - 1)
        self.confidence = (torch.tensor(self.confidence) + torch.bincount(places, minlength=BINS)).tolist()
        labels = found.label.flatten()
        counts = torch.bincount(labels[labels >= 0], minlength=found.probs.shape[1])
        self.classes = (counts + torch.tensor(self.classes or [0] * len(counts))).tolist()
        self.sure += float(kept.sum())
        self.entropy += float(_by_image(found.entropy)[answered].sum())

    @property
    def mean_confidence(self) -> float:
        """Mean largest probability; NaN without images."""
        return self.sure / self.images if self.images else math.nan


@dataclass
class CurvePoint:
    """A stretch of a run: sums over its images.

    Attributes:
        images: how many; `batches`: in how many.
        answered: of the images; `sure`: sum of their largest probabilities.
        labelled: images with a label; `wrong`: answered wrongly, or not at all.
        asked: images that the source network answered too; `source_sure`: sum of its largest probabilities.
    """

    images: int = 0
    batches: int = 0
    answered: int = 0
    sure: float = 0.0
    labelled: int = 0
    wrong: int = 0
    asked: int = 0
    source_sure: float = 0.0

    def __add__(self, other: "CurvePoint") -> "CurvePoint":
        return CurvePoint(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(frozen=True)
class ShownImage:
    """An image that a page shows, with its answer.

    Attributes:
        pixels: uint8, height × width × 3.
        confidence: its largest probability.
        label: its answer; −1 where the network answers each pixel or label.
        truth: its label, if there is one.
        name: where it is stored, or its place in the run.
    """

    pixels: Tensor
    confidence: float
    label: int
    truth: int | None
    name: str


class Recording:
    """What a page shows of a run, batch by batch; the same size after an hour and after a month.

    Attributes:
        adapted: the answers of the network.
        source: those of the source network, to the images that it was asked about.
        same: the answers of the network to those images; `agreed`: how many were the source's.
        curve: the run in stretches.
        shown: the surest and least sure images, and the surest mistakes, by these names.
        packs: how many images each pack answered, by name.
        preprocess: what was done to the images, so that they can be shown as they were.
        classes: the names of the classes.

    Examples:
        >>> seen = Recording()
        >>> seen.add(torch.rand(2, 3, 8, 8), Prediction.of(torch.tensor([[0.9, 0.1], [0.4, 0.6]])))
        >>> seen.adapted.images, round(seen.adapted.mean_confidence, 2)
        (2, 0.75)
    """

    KINDS = ("surest", "least sure", "surest mistakes")

    def __init__(self, preprocess: "Preprocess | None" = None, classes: Sequence[str] | None = None) -> None:
        self.preprocess, self.classes = preprocess, classes
        self.adapted, self.source, self.same = AnswerCounts(), AnswerCounts(), AnswerCounts()
        self.agreed = 0
        self.curve: list[CurvePoint] = []
        self.shown: dict[str, list[ShownImage]] = {kind: [] for kind in self.KINDS}
        self.packs: dict[str, int] = {}
        self._stretch = 1  # batches in a point

    def add(
        self, images: Any, prediction: Prediction, labels: Tensor | None = None, names: Sequence[str] | None = None
    ) -> None:
        """Take in one batch and its answers; this waits for a GPU.

        Args:
            images: the batch, as a loader gives it.
            labels: its true classes.
            names: where each image is stored. Default: its place in the run.
        """
        found = prediction.cpu()
        first = self.adapted.images + self.adapted.unanswered
        self.adapted.add(found)
        for name in getattr(found, "pack", ()):
            self.packs[name] = self.packs.get(name, 0) + 1
        confidence, answered = _by_image(found.probs.amax(1)), _by_image((found.label >= 0).double()) > 0
        per_image = found.label.ndim == 1
        right = None
        if labels is not None:
            right = _by_image((found.label == labels.cpu()).double())
        self._go_on(
            CurvePoint(
                len(found),
                1,
                int(answered.sum()),
                float(confidence[answered].sum()),
                0 if right is None else len(right),
                0 if right is None else round(float((1 - right).sum())),
            )
        )
        pictures = images_of(images)
        if not can_be_shown(pictures):
            return

        def shown(at: int) -> ShownImage:
            return ShownImage(
                thumbnail(pictures[at], self.preprocess),
                float(confidence[at]),
                int(found.label[at]) if per_image else -1,
                int(labels[at]) if per_image and labels is not None else None,
                names[at] if names is not None else f"image {first + at + 1:,}",
            )

        score = confidence.where(answered, torch.nan)
        self._keep("surest", score, shown)
        self._keep("least sure", -score, shown)
        if right is not None and per_image:
            self._keep("surest mistakes", score.where(right == 0, torch.nan), shown)

    def compare(self, source: Prediction, adapted: Prediction) -> None:
        """Take in the answers of both networks to the same images: those of the batch that was added last."""
        one, other = source.cpu(), adapted.cpu()
        both = (one.label >= 0) & (other.label >= 0)
        images, sure = self.source.images, self.source.sure
        self.source.add(one)
        if self.curve:
            self.curve[-1] += CurvePoint(asked=self.source.images - images, source_sure=self.source.sure - sure)
        self.same.add(other)
        self.agreed += round(float(_by_image(((one.label == other.label) & both).double()).sum()))

    @property
    def agreement(self) -> float:
        """Share of images with the source network's answer; NaN where it was not asked."""
        return self.agreed / self.source.images if self.source.images else math.nan

    def error(self) -> float:
        """Share of wrong answers among images with labels; NaN without any."""
        whole = sum(self.curve, CurvePoint())
        return whole.wrong / whole.labelled if whole.labelled else math.nan

    def _go_on(self, point: CurvePoint) -> None:
        if self.curve and self.curve[-1].batches < self._stretch:
            self.curve[-1] += point
        else:
            self.curve.append(point)
        if len(self.curve) == 2 * POINTS and self.curve[-1].batches == self._stretch:
            self.curve = [a + b for a, b in zip(self.curve[::2], self.curve[1::2], strict=True)]
            self._stretch *= 2

    def _keep(self, kind: str, score: Tensor, shown: Any) -> None:
        """Keep the images of the largest scores; NaN is never kept. Equal ones stay in their order."""
        kept, sign = self.shown[kind], -1.0 if kind == "least sure" else 1.0
        bar = sign * kept[-1].confidence if len(kept) == SHOWN else -math.inf
        best = score.nan_to_num(nan=-math.inf).topk(min(SHOWN, len(score)))
        new = [shown(at) for value, at in zip(best.values.tolist(), best.indices.tolist(), strict=True) if value > bar]
        self.shown[kind] = sorted(kept + new, key=lambda image: -sign * image.confidence)[:SHOWN]

    def state_dict(self) -> dict[str, Any]:
        """Return everything as plain values and tensors, for a stream that stops and goes on."""
        return {
            **{name: asdict(getattr(self, name)) for name in ("adapted", "source", "same")},
            "agreed": self.agreed,
            "curve": [list(vars(point).values()) for point in self.curve],
            "shown": {kind: [dict(vars(image)) for image in images] for kind, images in self.shown.items()},
            "packs": dict(self.packs),
            "stretch": self._stretch,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        for name in ("adapted", "source", "same"):
            setattr(self, name, AnswerCounts(**state[name]))
        self.agreed, self._stretch, self.packs = state["agreed"], state["stretch"], dict(state["packs"])
        self.curve = [CurvePoint(*values) for values in state["curve"]]
        self.shown = {kind: [ShownImage(**image) for image in images] for kind, images in state["shown"].items()}


def _by_image(values: Tensor) -> Tensor:
    """Return one number per image: the mean over its pixels or labels."""
    return values.double().flatten(1).mean(1) if values.ndim > 1 else values.double()
