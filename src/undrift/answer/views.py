"""Symmetric views of an image, and a label-free test of which are safe for a network.

A view is safe if it changes no label: the mirror image of a cat is a cat, that of a "d" is a "b". Averaging answers
over safe views improves them; unsafe views ruin them.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from undrift._errors import OptionError
from undrift.posterior.outputs import spread

AUTO = "auto"
SURE = 0.5  # the part of the images that the test uses: the most confident ones
AGREEMENT = 0.7  # photographs under severe corruptions keep 0.78 and more, mirrored digits 0.55 at most
ABOVE_CHANCE = 2 / 3  # part of the way from chance to certainty: 0.7 of ten classes; mirrored digits keep 0.82 of two
LEAST, MOST = 64, 640  # images that the test needs before it calls a view safe; those that it waits for more classes
VARIED = 0.5  # the part of the entropy of all classes that the answers must have
POSITIONS = 4096  # pixels of an image that the test looks at, evenly spread
CLEAR = 0.85  # from which on a mirror image needs no comparison: photographs mostly keep it, mirrored digits never
UNLIKE = 3.0  # below it in runs of one class of photographs, above it for digits (benchmarks/runs_by_views.py)


@dataclass(frozen=True)
class ReversibleView:
    """A view of images, and the way back for a map of their pixels."""

    there: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor]

    def __call__(self, images: Tensor) -> Tensor:
        """Return the images seen so."""
        return self.there(images)

    def answer(self, logits: Tensor) -> Tensor:
        """Return logits of the view in the images' own places; one row per image has none."""
        return logits if logits.ndim < 4 else self.back(logits)

    def then(self, other: "ReversibleView") -> "ReversibleView":
        """Return this view, seen through another one."""
        return ReversibleView(lambda x: other.there(self.there(x)), lambda y: self.back(other.back(y)))


def mirror(images: Tensor) -> Tensor:
    """Return the images mirrored from left to right."""
    return images.flip(-1)


def shift(images: Tensor, down: int, right: int) -> Tensor:
    """Return the images moved by whole pixels; what comes in from outside is the border reflected."""
    rows, columns = abs(down), abs(right)
    wide = F.pad(images, (columns, columns, rows, rows), mode="reflect")
    height, width = images.shape[-2:]
    return wide[..., rows - down : rows - down + height, columns - right : columns - right + width]


def nudged(images: Tensor, way: int = 1) -> Tensor:
    """Return the images moved by a sixteenth of their size, down and to the right; `way` −1 moves them back."""
    down, right = (way * max(1, size // 16) if size > 1 else 0 for size in images.shape[-2:])
    return shift(images, down, right)


SAME = ReversibleView(lambda images: images, lambda logits: logits)
VIEWS = {"mirror": ReversibleView(mirror, mirror), "shift": ReversibleView(nudged, lambda logits: nudged(logits, -1))}
"""Views by name."""


def drawn_views(images: Tensor, names: Sequence[str], chances: Tensor) -> Tensor:
    """Return each image in a view of its own: mirrored or not, moved by up to a sixteenth of its size or not.

    Args:
        names: of `VIEWS`.
        chances: three numbers in [0, 1) for each image; they decide on the mirror, and how far down and to the right.
    """
    height, width = images.shape[-2:]
    chances = chances.to(images.device)

    def along(size: int, chance: Tensor) -> Tensor:
        far = size // 16 * ("shift" in names)
        moved = torch.arange(size, device=images.device) - (chance * (2 * far + 1)).long().sub(far)[:, None]
        return size - 1 - (size - 1 - moved.abs()).abs()  # reflected at both borders

    rows, columns = along(height, chances[:, 1]), along(width, chances[:, 2])
    if "mirror" in names:
        columns = torch.where(chances[:, :1] < 0.5, width - 1 - columns, columns)
    count, channels = (torch.arange(size, device=images.device) for size in images.shape[:2])
    return images[count[:, None, None, None], channels[:, None, None], rows[:, None, :, None], columns[:, None, None]]


def chosen(names: str | Sequence[str]) -> tuple[str, ...]:
    """Return names of views, checked."""
    listed = (names,) if isinstance(names, str) else tuple(names) if isinstance(names, Iterable) else (names,)
    unknown = [name for name in listed if name not in VIEWS]
    if AUTO in unknown:
        raise OptionError(
            f'views={names!r}: "auto" needs a stream or epochs to test the views on, and stands alone; needed: '
            f"{', '.join(VIEWS)}. Name views under which no label changes."
        )
    if unknown:
        raise OptionError(
            f"views={names!r}: {', '.join(map(repr, unknown))} is not one of {', '.join(VIEWS)}. Name views under "
            "which no label changes."
        )
    return listed


def combined(names: Sequence[str]) -> list[ReversibleView]:
    """Return every combination of the views, the image itself first: mirror and shift make four.

    Examples:
        >>> len(combined(("mirror", "shift"))), len(combined(()))
        (4, 1)
    """
    views = [SAME]
    for name in names:
        views += [first.then(VIEWS[name]) for first in views]
    return views


def disagreement(probs: Tensor, of_view: Tensor) -> Tensor:
    """Return for each image whether its view has another label; of pixels, how many of them have.

    Labels and not probabilities: a network that is sure of nothing changes few probabilities, and many labels.
    """
    return (probs.argmax(1) != of_view.argmax(1)).float().reshape(len(probs), -1).mean(1)


def mirror_tells(mirrored: Tensor, shifted: Tensor) -> bool:
    """Return whether mirror images are images of the same kind, by the labels that they and small shifts change.

    A network that is unsure changes labels under both. A mirrored digit is no digit: a network that knows the image may
    change its label, and keeps that of the shift.
    """
    return float(mirrored.mean()) <= UNLIKE * float(shifted.mean())


class SafeViews:
    """Decides without labels which views are safe, from a network's answers to images and to their views.

    The rule: of the half of the images whose answer is surest, 70 % must keep their label under the view, and of the
    half whose view's answer is surest, 70 % must have it on the image too; the test uses at least 64 images. A network
    that is unsure of everything passes no view. With fewer than ten classes more must agree, because more do by chance:
    a part (2 + 1 / classes) / 3, which is 83 % of two classes.

    One class in a run of images, or one answer to everything, proves nothing: a mirrored zero is a zero. So the answers
    must have half of the entropy of all classes, or of ten; without that in 640 images, no view passes.

    Of shapes that a network hardly knows, such as blurred digits, mirror images may agree as often. So below 85 % those
    fail that change more than three times as many labels as a small shift does.

    Where each pixel (or label) has an answer, the rule is about the surest half of each predicted class's pixels, and
    the 70 % are a mean over classes: most pixels are background, which looks the same in every view.

    Attributes:
        passed: for each view whether it passed; None while too few images were seen.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._found: dict[str, list[Tensor]] = {name: [] for name in names}
        self._labels = torch.zeros(0)  # how often each class was the answer; of pixels only how many classes there are

    def look(self, logits: Tensor, view: str, logits_of_view: Tensor) -> None:
        """Take in the answers to a batch and to its view."""
        p, q = logits.float().softmax(1), logits_of_view.float().softmax(1)
        if not len(self._labels):
            self._labels = torch.zeros(p.shape[1])
        if p.ndim > 2:
            found = _by_class(p, q)
        else:
            columns = p.amax(1), q.amax(1), (p.argmax(1) == q.argmax(1)).float()
            found = torch.stack([c.reshape(len(c), -1).mean(1) for c in columns], 1).detach()
            if view == self.names[0]:
                self._labels = self._labels + p.argmax(1).cpu().bincount(minlength=p.shape[1])
        self._found[view] = [torch.cat([*self._found[view], found.cpu()])]

    @property
    def seen(self) -> int:
        """Images tested so far."""
        return min((sum(map(len, found)) for found in self._found.values()), default=0)

    def agreement(self, view: str) -> float:
        """Return the lower of both parts that keep their label; NaN before the first image."""
        if not self._found[view]:
            return math.nan
        rows = torch.cat(self._found[view])
        if rows.ndim > 2:
            kept, sure = rows.sum(0)
            return float(torch.where(sure > 0, kept / sure, torch.nan).nanmean(0).amin())
        count = max(1, int(SURE * len(rows)))
        return min(float(rows[rows[:, side].topk(count).indices, 2].mean()) for side in (0, 1))

    @property
    def passed(self) -> tuple[str, ...] | None:
        """The views that passed; None while too few images were seen, or too few classes in them."""
        if self.seen < LEAST:
            return None
        if not self._varied:
            return () if self.seen >= MOST else None
        by_chance = 1 / len(self._labels) if len(self._labels) else 0.0
        needed = max(AGREEMENT, by_chance + ABOVE_CHANCE * (1 - by_chance))
        return tuple(name for name in self.names if self.agreement(name) >= needed and not self._unlike(name))

    @property
    def _varied(self) -> bool:
        """Whether the answers are of several classes; pixels are mostly background, and count by class."""
        if not self._labels.sum():
            return True
        part = self._labels / self._labels.sum()
        return float(torch.special.entr(part).sum()) >= VARIED * math.log(min(len(part), 10))

    def _unlike(self, name: str) -> bool:
        """Return whether mirror images are of another kind, by what a small shift of the images changes."""
        kept = self.agreement(name)
        tested = name == "mirror" and "shift" in self.names
        return tested and kept < CLEAR and 1 - kept > UNLIKE * (1 - self.agreement("shift"))

    def state(self) -> dict[str, Tensor]:
        """Return what was seen, for a run that goes on."""
        found = {name: torch.cat(found) for name, found in self._found.items() if found}
        return {**found, "labels": self._labels} if found else {}

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from a state."""
        self._found = {name: [state[name].cpu()] if name in state else [] for name in self.names}
        self._labels = state["labels"].cpu() if "labels" in state else torch.zeros(0)  # missing in older files


def _by_class(p: Tensor, q: Tensor) -> Tensor:
    """Return for each image, class and side how many sure pixels keep their class, and how many there are.

    Args:
        p: probabilities of the pixels, images × classes × positions; `q`: those of a view of them.

    Returns:
        Images × 2 × classes × 2 sides: of the pixels sure on the image, and of those sure on its view.
    """
    count, classes = p.shape[:2]
    (sure, label), (sure_of_view, of_view) = (spread(each, POSITIONS).max(1) for each in (p, q))
    found = p.new_zeros(count, 2, classes, 2)
    for side, (confidence, own) in enumerate(((sure, label), (sure_of_view, of_view))):
        for c in own.unique().tolist():
            mine = own == c
            counted = mine & (confidence >= confidence[mine].quantile(1 - SURE))
            found[:, 0, c, side] = (counted & (label == of_view)).sum(1).float()
            found[:, 1, c, side] = counted.sum(1).float()
    return found


class ViewsInUse:
    """The views that answers are averaged over: those that were named, or with "auto" those that pass the test.

    Args:
        names: names of `VIEWS`, or "auto".
        most: how many are used; the first ones are.
    """

    def __init__(self, names: str | Sequence[str], most: int | None = None) -> None:
        names = (names,) if isinstance(names, str) else tuple(names)
        self.most = most
        self._test = SafeViews(tuple(VIEWS)) if names == (AUTO,) else None
        self._names = chosen(names) if self._test is None else None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the views; none while a test has seen too few images."""
        return (self._names or ())[: self.most]

    @property
    def decided(self) -> bool:
        """Whether the names stay what they are."""
        return self._names is not None

    def look(self, images: Tensor, ask: Callable[[Tensor], Tensor]) -> None:
        """Test the views on a batch, where that is still to be done; `ask` returns logits."""
        if self._test is None or self.decided or images.ndim != 4:
            return
        with torch.no_grad():
            logits = ask(images)
            for name in self._test.names:
                self._test.look(logits, name, VIEWS[name].answer(ask(VIEWS[name](images))))
        self._names = self._test.passed

    def of(self, images: Tensor) -> list[ReversibleView]:
        """Return the views of a batch, the images themselves first; only images have any."""
        return combined(self.names if images.ndim == 4 else ())

    def state(self) -> dict[str, Tensor]:
        """Return what the test has seen, for a run that goes on."""
        return {} if self._test is None else self._test.state()

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from a state."""
        if self._test is not None:
            self._test.load(state)
            self._names = self._test.passed
