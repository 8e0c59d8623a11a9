"""Decide which images of a stream share a step, if the likelihood can tell.

- A batch of 64 images or more is a step; smaller ones wait until they are 64. In segmentation an image has many
  answers, and every batch is a step.
- A batch with few classes is not a sample of the domain: its classes come in runs. It is answered with its own
  statistics in the first norm layers only, and by the source network. Its images of the most frequent class go to a
  memory that is balanced over predicted classes. Steps are taken on it while it holds four classes or more.

The report records when each of the two begins and ends.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from undrift._types import Doubt
from undrift.answer.prediction import entropy_of
from undrift.loop.balanced import BalancedGather
from undrift.loop.gather import Gather
from undrift.loop.stream_report import StreamReport

ENOUGH = 64
"""Images for a step."""

ROOM = 128
"""Images in the balanced memory (benchmarks/balanced.py)."""

DOUBT, WORSE, FEWER = 0.15, 0.08, 0.8
"""The least disagreement of views, how much worse own statistics make answers, and what may be left of labels' entropy.

All three have to hold (benchmarks/runs_by_views.py). A hard domain alone makes views disagree, and a network may answer
it with few classes; but its own statistics make answers better there, not worse."""

VARIED = 4
"""Classes that a memory needs for a step; of a network that knows fewer than eight, half of them.

A run that is longer than the memory looks back leaves one there, and class and domain are then the same."""

FEW, SAME = 3.0, 4
"""What counts in a run (`answer_of_run`): a nat of entropy less is worth e³, and the source agreement to this power."""

AGAIN, CALM = 2, 10
"""In a time of runs, so many batches without doubt in a row until one is a step, and until the time has ended."""


def limits(runs: bool) -> tuple[float, float, float]:
    """Return the least disagreement of views, the least that is worse, and the most that is left of labels' entropy.

    Args:
        runs: whether classes come in runs so far. Then half of the evidence is enough, and answers that are no better:
            a step on a run that is missed would make its statistics those of the domain.
    """
    return (DOUBT / 2, 0.0, (1 + FEWER) / 2) if runs else (DOUBT, WORSE, FEWER)


def misleading(doubt: Doubt, runs: bool = False) -> bool:
    """Return whether images' own statistics mislead: whether they hide that the images are of few classes."""
    views, worse, left = limits(runs)
    if not doubt.kept:  # one label for all of them: a run, or a network that cannot cope with the domain
        views = DOUBT
    return doubt.views > views and doubt.worse > worse and doubt.kept < left * doubt.counted


def answer_of_run(source: Tensor, own: Tensor) -> Tensor:
    """Return the mean of the source's and the adapted network's probabilities for images whose classes come in runs.

    What names few classes counts more: weights are e^(−FEW · H), H the entropy of a network's mean probabilities. But a
    source that cannot cope with a domain may answer it with a single class. So its weight is multiplied by a^SAME, a
    the share of images that both give the same label: where the source still works, they mostly agree.
    """
    probs = torch.stack([source, own])
    weights = (-FEW * entropy_of(probs.mean(1))).softmax(0)
    agreed = (source.argmax(1) == own.argmax(1)).to(weights).mean()
    weights = weights * torch.stack([agreed**SAME, torch.ones_like(agreed)])
    return (weights[:, None, None] * probs).sum(0) / weights.sum()


class Pacing:
    """What waits for a step, and whether classes come in runs.

    Attributes:
        gather: images that wait until they are enough.
        balanced: a memory for times of runs.
        maps: whether each pixel has an answer; None before the first batch.
    """

    def __init__(self, report: StreamReport) -> None:
        self.report = report
        self.gather, self.balanced = Gather(ENOUGH), BalancedGather(ROOM)
        self.maps: bool | None = None
        self._few = 0  # small batches in a row
        self._gathering, self._runs, self._calm, self._again = False, False, 0, AGAIN

    def whole(self, images: Tensor) -> bool:
        """Return whether a batch is large enough for a step of its own."""
        if len(images) >= ENOUGH:
            self._few = 0
            return True
        self._few += 1
        if self._few == 2 and not self._gathering:  # a single one may end a folder
            self._gathering = True
            self.report.event(
                "gather on", f"batches of {len(images)} are few for a step; one is made every {ENOUGH} images"
            )
        return False

    def sample(self, doubt: Doubt) -> bool:
        """Return whether images are a sample of the domain."""
        if not misleading(doubt, self._runs):
            self._calm += 1
            if self._runs and self._calm < self._again:  # a missed run costs more than a missed step
                return False
            if self._runs and self._calm >= CALM:
                self._runs = False
                self.report.event("balanced off", f"classes are mixed again, in {CALM} steps in a row")
            return True
        self._calm = 0
        self._again = AGAIN if doubt.kept else 1  # as in `misleading`: it may be no run
        if not self._runs:
            self._runs = True
            few, many = math.exp(doubt.kept), math.exp(doubt.counted)
            self.report.event(
                "balanced on",
                f"classes come in runs: these images are of about {few:.1f} classes. By their own norm statistics they "
                f"would be of {many:.1f}, but then another view changes the label of {doubt.views:.0%} of them",
            )
        return False

    @property
    def runs(self) -> bool:
        """Whether classes come in runs."""
        return self._runs

    def forget(self, images: Tensor) -> None:
        """Drop all images like these."""
        self.gather.forget(images)
        self.balanced.forget(images)

    def remember(self, images: Tensor, probs: Tensor, step: Callable[[Tensor, int], bool]) -> None:
        """Put images of a run into the balanced memory, and make the step that is due.

        Only those of the most frequent class go there. In a run, the others are mostly mistakes, and a memory with
        equally many images of each class would soon hold little else.

        Args:
            probs: the answers to the images.
            step: makes a step on images, so many of them new; returns whether they may stay.
        """
        labels = probs.argmax(1).cpu()
        others = labels != labels.mode().values
        memory = self.balanced.of(images).added(images, labels.masked_fill(others, -1))
        most = max(1 / VARIED, 2 / probs.shape[1])
        if not (memory.ready and max(Counter(memory.classes).values()) <= most * len(memory.classes)):
            self.balanced.put(images, memory)
            return
        assert memory.images is not None, "a memory that is ready holds images"
        if step(memory.images, memory.new):
            self.balanced.learned(images, memory)
        else:
            self.balanced.forget(images)

    def state(self) -> dict[str, Any]:
        """Return what waits, and how it stands."""
        return {
            "waiting": self.gather.state()["waiting"],
            "memories": self.balanced.state()["memories"],
            "stands": (self.maps, self._few, self._gathering, self._runs, self._calm, self._again),
        }

    def load(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Go on from a state."""
        self.gather.load(state, device)
        self.balanced.load(state, device)
        self.maps, self._few, self._gathering, self._runs, self._calm, self._again = state["stands"]
