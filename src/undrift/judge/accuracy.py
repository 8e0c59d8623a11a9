"""Estimate without labels the accuracy of a network and of its adapted form, and the difference.

A network that knows an image gives the same answer to its mirror image. A collapsed one gives the same answer to every
image. So an answer is credible if it stays the same over the views of an image, and if it is more probable for this
image than on average. With logits z of views v, and m the mean of q over the images:

    belief:    q(y | x) = mean over v of softmax(z_v / T)_y,   p(y | x) ∝ q(y | x) / m(y)
    accuracy = mean over images of p(answer | x)

If two networks give the same answer, neither gains. If they differ, their beliefs are combined as independent evidence:
p·p′, normalised. Nothing is trained; T depends on the scale of the logits. `benchmarks/helping.py` compares this with
labels.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Judgement = Literal["helped", "hurt", "unclear"]

SURE = 8.0
"""Logit of the probability that an image of mean margin gets, against all other classes together: 99.97 %.

Chosen on development data by the rule in `benchmarks/helping.py`.
"""

OWN_ERROR, OWN_ERROR_ALONE = 0.05, 0.25
"""What an estimated accuracy is off by: root mean square over development cases; without views, README's example."""

OWN_ERROR_OF_GAIN, OWN_ERROR_ALONE_OF_GAIN = 0.10, 0.22
"""The same of a gain, per root of the share of images that are answered differently."""

LAPSE = 0.02
"""Part of every belief that is spread over all classes: without it, certainty about everything would count."""

MOST_SHRUNK = 1.7
"""By how much a source network's margin is taken to have shrunk at most; 1.66 on the severest blur of development."""

FEW = 100
"""With fewer images the sentence says so."""


@dataclass(frozen=True)
class Estimate:
    """A number between −1 and 1, and its standard error: of chance, and of the method on development data."""

    value: float
    error: float

    def __str__(self) -> str:
        return f"{100 * self.value:.0f} ± {100 * self.error:.0f} %"

    @property
    def points(self) -> str:
        """The estimate of a change, such as "+20 ± 4 points"."""
        value = round(100 * self.value, 0) + 0.0  # -0.0 + 0.0 is 0.0: no change has no minus sign
        return f"{value:+.0f} ± {100 * self.error:.0f} points"


@dataclass(frozen=True)
class Helping:
    """Estimated accuracy of a source network and of its adapted form on the same images; `str` is a sentence.

    Attributes:
        source: share of the images that the source network answers rightly.
        adapted: share that the adapted network does.
        gain: adapted − source. Only images that they answer differently count, so it is surer than its parts.
        images: how many were used.
        classes: how many answers there are.
        agreement: share of images with the same answer.
        predicted: classes that the source network and the adapted network answer with.
        views: how many views of each image were used.
    """

    source: Estimate
    adapted: Estimate
    gain: Estimate
    images: int
    classes: int
    agreement: float
    predicted: tuple[int, int]
    views: int

    @property
    def judgement(self) -> Judgement:
        """Whether adaptation helped or hurt by more than a standard error; else "unclear"."""
        if self.images < 2 or abs(self.gain.value) <= self.gain.error:
            return "unclear"
        return "helped" if self.gain.value > 0 else "hurt"

    @property
    def doubts(self) -> tuple[str, ...]:
        """What the estimate does not know."""
        found = []
        if self.images < max(FEW, self.classes):
            found.append(f"{self.images} images are few for {self.classes} classes")
        if max(self.predicted) == 1:
            found.append("both networks give one answer to everything")
        elif min(self.predicted) == 1:
            found.append("one network gives one answer to everything, right only if all images are of that class")
        if self.classes == 2:
            found.append("of two classes a wrong answer looks much like a right one")
        if self.views == 1:
            found.append(
                "it rests on confidence alone, as no mirrored or shifted view of an image is known to keep its label"
            )
        return tuple(found)

    def __str__(self) -> str:
        points = self.gain.points
        judged = {
            "helped": f"adaptation helped ({points})",
            "hurt": f"adaptation HURT ({points})",
            "unclear": f"unclear whether adaptation helped ({points})",
        }[self.judgement]
        text = (
            f"{judged}: estimated without labels on {self.images:,} images, the source network is right on "
            f"{self.source}, the adapted one on {self.adapted}"
        )
        return "; ".join((text, *self.doubts))

    __repr__ = __str__  # what a notebook shows

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain JSON values, with the judgement and the sentence."""
        plain = {**asdict(self), "predicted": list(self.predicted)}
        return {**plain, "judgement": self.judgement, "doubts": list(self.doubts), "sentence": f"{self}."}

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> "Helping":
        """Return what `as_dict` wrote."""
        own: dict[str, Any] = {name: plain[name] for name in ("images", "classes", "agreement", "views")}
        own |= {name: Estimate(**plain[name]) for name in ("source", "adapted", "gain")}
        return cls(**own, predicted=tuple(plain["predicted"]))


def margin(logits: Tensor) -> float:
    """Return by how much the largest logit is above the mean of the others, on average over images."""
    top = logits.amax(-1)
    return float((top - (logits.sum(-1) - top) / (logits.shape[-1] - 1)).mean())


def flattening(margin: float, classes: int, sure: float = SURE) -> float:
    """Return the T under which an image of this margin gets probability sigmoid(sure), and at least 1.

    Adaptation makes networks surer whether or not it makes them better; dividing by their own margin takes that out.
    """
    return max(1.0, margin / (math.log(classes - 1) + sure))


def belief(views: Tensor, temperature: float) -> Tensor:
    """Return p(y | x): the mean over the views, divided by how often a class is answered at all.

    The division is by the posterior mean of the classes' shares under a uniform Dirichlet prior, so that a thousand
    classes do not turn a hundred images into a hundred certainties.

    Args:
        views: logits (or log-probabilities), views × images × classes; the images themselves come first.
    """
    classes = views.shape[-1]
    q = (1 - LAPSE) * (views / temperature).softmax(-1).mean(0) + LAPSE / classes
    share = (q.sum(0) + 1) / (len(q) + classes)
    p = q / share
    return p / p.sum(1, keepdim=True)


def right(source: Tensor, adapted: Tensor, sure: float = SURE) -> tuple[Tensor, Tensor]:
    """Return for each image the probability that the source network's answer is right, and the adapted network's.

    Args:
        source: logits of the source network, views × images × classes; the first view's are the answers.
        adapted: those of the adapted network, for the same images; its views may be others, or fewer.
    """
    source, adapted = source.detach().double(), adapted.detach().double()
    classes = source.shape[-1]
    scale = margin(adapted[0])
    # On images that it does not know, a network's logits may shrink, which is no reason to believe it more; those of a
    # network that went astray may be of any size, which is none to believe its source less.
    own = margin(source[0])
    before = belief(source, flattening(max(own, min(scale, MOST_SHRUNK * own)), classes, sure))
    after = belief(adapted, flattening(scale, classes, sure))
    answers = source[0].argmax(1), adapted[0].argmax(1)
    alone = [_at(p, answer) for p, answer in zip((before, after), answers, strict=True)]
    both = (before.clamp_min(1e-9).log() + after.clamp_min(1e-9).log()).softmax(1)
    same = answers[0] == answers[1]
    agreed = sum(alone) / 2
    first, second = (torch.where(same, agreed, _at(both, answer)) for answer in answers)
    return first, second


def helping(source: Tensor, adapted: Tensor, positions: int = 1) -> Helping:
    """Return the estimated accuracy of two networks on the same images, and of the difference.

    Args:
        source: logits (or log-probabilities) of the source network, views × images × classes; the first view's are the
            answers. Images with NaN or infinity in either are left out.
        adapted: those of the adapted network.
        positions: rows of an image, which come one after another, where a network answers each pixel or label.

    Examples:
        >>> right, wrong = torch.eye(4).repeat(50, 1) * 9, torch.zeros(200, 4)
        >>> wrong[:, 0] = 9  # one answer to everything
        >>> helping(wrong[None], right[None]).judgement
        'helped'
    """
    sound = source.isfinite().all(-1).all(0) & adapted.isfinite().all(-1).all(0)
    source, adapted = source[:, sound], adapted[:, sound]
    # The pixels of an image are right or wrong together, so images count.
    count, classes = -(-source.shape[1] // positions), source.shape[2]
    if count == 0:
        nothing = Estimate(0.0, 1.0)
        return Helping(nothing, nothing, nothing, 0, classes, 0.0, (0, 0), len(source))
    first, second = right(source, adapted)
    answers = source[0].argmax(1), adapted[0].argmax(1)
    differ = answers[0] != answers[1]
    part, gain = float(differ.double().mean()), float((second - first).mean())
    # Each image brings +1, −1 or 0, and 0 for certain where the answers are the same.
    square = float(torch.where(differ, first + second, 0).mean())
    views = min(len(source), len(adapted))
    own, of_gain = (OWN_ERROR_ALONE, OWN_ERROR_ALONE_OF_GAIN) if views == 1 else (OWN_ERROR, OWN_ERROR_OF_GAIN)
    return Helping(
        _share(first, count, own),
        _share(second, count, own),
        _estimate(gain, square - gain**2, count, of_gain * math.sqrt(part)),
        count,
        classes,
        1 - part,
        (len(answers[0].unique()), len(answers[1].unique())),
        views,
    )


def _share(probabilities: Tensor, count: int, own: float) -> Estimate:
    mean = float(probabilities.mean())
    return _estimate(mean, mean * (1 - mean), count, own)


def _estimate(value: float, variance: float, count: int, own: float) -> Estimate:
    """Return an estimate of so many images, with an error of the method's own."""
    return Estimate(value, math.sqrt(max(variance, 0.0) / count + own**2))


def _at(p: Tensor, answer: Tensor) -> Tensor:
    return p.gather(1, answer[:, None])[:, 0]
