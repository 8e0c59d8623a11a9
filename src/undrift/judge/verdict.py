"""Judge an adaptation without labels.

A network that adapts well becomes more confident of each image while its answers stay as diverse as the domain. One
that collapses becomes more confident too, because it gives the same answer to every image. So entropy means nothing
without diversity.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from undrift._errors import DataError
from undrift.judge.accuracy import Helping
from undrift.posterior.outputs import by_position
from undrift.system.warning import warn

FALL = 0.5
"""Diversity below this share of the source network's is far below.

Diversity is a logarithm, so half of it means the square root of the classes in use: 10 become 3, 1,000 become 32.
"""

SURE = 0.5
"""Mean entropy below this share of the source network's counts as grown sure.

A network that lost diversity *and* confidence has not collapsed onto one answer.
"""

ALWAYS_SURE = 0.05
"""Mean entropy over ln(classes) that always counts as sure: half of a sure source's entropy is hard to reach."""

_AT_ONCE = 2**22
"""Logits that a survey collects on the device before it copies them: 16 MB."""


@dataclass(frozen=True)
class Survey:
    """A network's answers to a whole domain, summarised.

    Attributes:
        samples: number of images.
        classes: number of classes it could answer.
        predicted: number of classes that are the answer for some image.
        entropy: mean over images of H(p), in nats.
        diversity: H(mean of p) / ln(classes): 1 when all classes are used equally, 0 when it is always one.
        agreement: share of images with the source network's answer; None if images cannot be matched.
        stability: share of images with the same answer as one epoch before; None if unknown.
    """

    samples: int
    classes: int
    predicted: int
    entropy: float
    diversity: float
    agreement: float | None = None
    stability: float | None = None

    @property
    def information(self) -> float:
        """H(mean of p) − mean of H(p), in nats: how much an answer says about its image."""
        return self.diversity * math.log(self.classes) - self.entropy


@dataclass(frozen=True)
class Verdict:
    """A label-free comparison of the adapted network (one pass of it) with its source; `print(verdict)` is a sentence.

    Attributes:
        before: the source network's answers.
        after: the adapted network's.
        helping: estimated accuracy of both on a sample of the images; None while a run is not finished.
        put_back: whether the source was put back because of this verdict (`keep="safe"`), so that the model answers as
            it did before.
    """

    before: Survey
    after: Survey
    helping: Helping | None = None
    put_back: bool = False

    @property
    def agreement(self) -> float | None:
        """Share of images with the same answer before and after."""
        return self.after.agreement

    @property
    def stability(self) -> float | None:
        """Share of images with the same answer in the judged epoch and the one before it."""
        return self.after.stability

    @property
    def collapsed(self) -> bool:
        """Whether the network now gives the same answer to almost everything."""
        return has_collapsed(self.before, self.after)

    @property
    def hurt(self) -> bool:
        """Whether the network is judged worse than its source: collapsed, or estimated to be right less often."""
        return self.collapsed or (self.helping is not None and self.helping.judgement == "hurt")

    def __str__(self) -> str:
        b, a = self.before, self.after
        facts = (
            f"entropy {abs(b.entropy):.3f} → {abs(a.entropy):.3f}, "  # rounding may leave −0
            f"diversity {abs(b.diversity):.2f} → {abs(a.diversity):.2f}, "
            f"{b.predicted} → {a.predicted} of {a.classes} classes predicted"
        )
        if self.agreement is not None:
            facts += f", {self.agreement:.0%} as the source network says"
        if self.stability is not None:
            facts += f", {self.stability:.0%} as the epoch before"
        lines = [f"{self._judgement()}: {facts}."]
        if self.helping is not None:
            lines.append(f"{self.helping}.")
        if self.put_back:
            lines.append("The source network was put back: the model answers as it did before.")
        return "\n".join(lines)

    __repr__ = __str__  # what a notebook shows

    def as_dict(self) -> dict[str, Any]:
        """Return the verdict as plain JSON values."""
        plain = {"before": asdict(self.before), "after": asdict(self.after)}
        helping = None if self.helping is None else self.helping.as_dict()
        said = {"collapsed": self.collapsed, "put_back": self.put_back, "sentence": str(self)}
        return {**plain, "helping": helping, **said}

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> "Verdict":
        """Return what `as_dict` wrote; files of earlier versions have no estimate, and put nothing back."""
        helping = plain.get("helping")
        before, after = (Survey(**plain[name]) for name in ("before", "after"))
        helped = None if helping is None else Helping.from_dict(helping)
        return cls(before, after, helped, plain.get("put_back", False))

    def warn(self) -> None:
        """Warn if the network collapsed, or the source was put back."""
        if self.put_back:
            warn(
                f'{self}\nLower the learning rate (adapt_lr), train fewer epochs, or give more images; keep="last" '
                "keeps the adapted network all the same."
            )
        elif self.collapsed:
            warn(
                f"{self}\nAnswers should stay about as diverse as the domain is; do not use this model unless nearly "
                "all images truly are of so few classes. Lower the learning rate (adapt_lr), train fewer epochs, take "
                'a likelihood with a diversity term (undrift.Shot, undrift.Information), or keep="best".'
            )

    def _judgement(self) -> str:
        if self.collapsed:
            return "COLLAPSED, the network answers the same for almost every image"
        if self.before.predicted == self.after.predicted == 1:
            return "nothing to tell a collapse by, the source network answers one class only, and so does this one"
        # Somewhat less is no bad sign, as a source network is often too sure of images it does not know.
        if self.after.information < FALL * self.before.information:
            return "doubtful, the answers say far less about their images than the source network's"
        if self.stability is not None and self.stability < 0.9:
            return "not settled, answers still change from epoch to epoch"
        return "no sign of collapse"


def has_collapsed(before: Survey, after: Survey) -> bool:
    """Return whether diversity fell far below the source network's while the answers became confident.

    One class for all images is a collapse too, whatever the confidence, unless the source network already gave that
    class to nine in ten images.
    """
    if after.predicted == 1 < before.predicted and (after.agreement is None or after.agreement < 0.9):
        return True
    sure = after.entropy < max(SURE * before.entropy, ALWAYS_SURE * math.log(after.classes))
    return sure and after.diversity < FALL * before.diversity


def survey(forward: Callable[[Tensor], Tensor], batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[Survey, Tensor]:
    """Return the survey of a domain, and the answer of each image by its index (−1 if there was none).

    Args:
        forward: maps images to logits.
        batches: indices, on the CPU, and images.
    """
    total = entropy = None
    answers: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for places, output in _on_cpu(forward, batches):
            sound = torch.isfinite(output).all(1)  # a network may overflow on a finite image
            places, log_p = places[sound], output[sound].log_softmax(1)
            p = log_p.exp()
            added = p.sum(0), -(p * log_p).nan_to_num().sum()
            total, entropy = added if total is None or entropy is None else (total + added[0], entropy + added[1])
            answers.append((places, p.argmax(1)))
    places = torch.cat([at for at, _ in answers]) if answers else torch.empty(0)
    if total is None or entropy is None or len(places) == 0:
        raise DataError(
            "the network gave no finite output for any image; adapt needs some images without NaN or infinity, and a "
            "network that answers them. Look at the images and the network's output first."
        )
    given = torch.cat([answer for _, answer in answers])
    labels = torch.full((int(places.max()) + 1,), -1)
    labels[places] = given
    mean = total / len(given)
    diversity = float(-(mean * mean.log()).nan_to_num().sum()) / math.log(len(mean))
    predicted = len(given.unique())
    return Survey(len(given), len(mean), predicted, float(entropy) / len(given), diversity), labels


def _on_cpu(
    forward: Callable[[Tensor], Tensor], batches: Iterable[tuple[Tensor, Tensor]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield indices and logits, in float64 on the CPU, as not every device has float64.

    Many batches at a time, because each transfer waits for the device.
    """
    waiting: list[tuple[Tensor, Tensor]] = []
    for places, images in batches:
        waiting.append(_with_places(places, forward(images)))
        if sum(output.numel() for _, output in waiting) >= _AT_ONCE:
            yield _moved(waiting)
            waiting = []
    if waiting:
        yield _moved(waiting)


def _with_places(places: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
    """Return `by_position`, each row with an index of its own."""
    found = by_position(output)
    count = len(found) // len(output)
    return (places if count == 1 else (places[:, None] * count + torch.arange(count)).flatten()), found


def _moved(waiting: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    places, outputs = zip(*waiting, strict=True)
    return torch.cat(places), torch.cat(outputs).cpu().double()


def same_answers(a: Tensor, b: Tensor) -> float:
    """Return the share of images with the same answer, among those that both networks saw."""
    length = min(len(a), len(b))
    both = (a[:length] >= 0) & (b[:length] >= 0)
    return float((a[:length] == b[:length])[both].double().mean())


def better(before: Survey, one: Survey, other: Survey) -> bool:
    """Return whether `one` is a better epoch than `other`: not collapsed first, then more information.

    Information is high if answers are sure and diverse; entropy alone would prefer a collapsed epoch.
    """

    def rank(of: Survey) -> tuple[bool, float]:
        return not has_collapsed(before, of), of.information

    return rank(one) > rank(other)
