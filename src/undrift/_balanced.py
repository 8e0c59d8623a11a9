"""Images whose classes come in runs: a step is made on as many of each predicted class, the newest of each.

Norm statistics and losses of a batch take it for a sample of the domain. Where a camera looks at one thing for a while
it is not: what normalises by such batches errs far more than the source network. So steps have a memory of their own,
balanced by what the network itself predicts (after NOTE, Gong et al. 2022, and RoTTA, Yuan et al. 2023).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from undrift._gather import SIZES, Gather
from undrift._interrupts import uninterrupted


class Memory:
    """Images of one size: at most `room` of them, the newest of each class, and of no class many more than of another.

    They lie in one tensor, so that a batch is taken in by one copy, and nothing else of it is kept.

    Attributes:
        places: of the images in that tensor, from the oldest to the newest.
        classes: what the network said of each.
        new: how many images came since the last step.
    """

    def __init__(self, room: int, like: Tensor) -> None:
        self._held = like.new_empty((room, *like.shape[1:]))
        self.places: list[int] = []
        self.classes: list[int] = []
        self.new = 0

    @property
    def images(self) -> Tensor:
        """A copy of all images, from the oldest to the newest."""
        return self._held[self.places]

    def add(self, images: Tensor, classes: Sequence[int]) -> None:
        """Take images in; where there is no room, the oldest of the most frequent classes makes some."""
        room, classes = len(self._held), [*self.classes, *classes]
        new = len(classes) - len(self.classes)
        kept = [*self.places, *range(room, room + new)]  # from `room` on: those that are still to be copied
        while len(kept) > room:
            counts = Counter(classes)
            most = max(counts.values())
            oldest = next(age for age, its in enumerate(classes) if counts[its] == most)
            del kept[oldest], classes[oldest]
        free = iter(sorted(set(range(room)).difference(kept)))
        taken = [place - room for place in kept if place >= room]
        kept = [place if place < room else next(free) for place in kept]
        with uninterrupted():  # what lies at a place has to be what the list says
            if taken:
                self._held[kept[-len(taken) :]] = images.detach()[taken]
            self.places, self.classes, self.new = kept, classes, self.new + new


class BalancedGather(Gather):
    """Gathers a balanced memory: once it is full, steps are made on all of it, one for half as many new images.

    Attributes:
        memories: one for each size and precision of images, as a batch has one.
    """

    balanced = True

    def __init__(self, least: int) -> None:
        super().__init__(least)
        self.memories: dict[tuple[Any, ...], Memory] = {}

    def due(self, images: Tensor) -> bool:
        """Return whether it will be time for a step with these."""
        return self._time(self.memories.get(_kind(images)), len(images))

    def enough(self, images: Tensor) -> Tensor | None:
        """Return the memory of images like these where it is time for a step."""
        memory = self.memories.get(_kind(images))
        return memory.images if memory is not None and self._time(memory) else None

    def _time(self, memory: Memory | None, more: int = 0) -> bool:
        """Return whether a memory is full, and half of as many images have come since the last step."""
        held, new = (0, 0) if memory is None else (len(memory.classes), memory.new)
        return held + more >= self.least and 2 * (new + more) >= self.least

    def learned(self, images: Tensor) -> None:
        """Wait for as many images again, and keep those that there are."""
        self.memories[_kind(images)].new = 0

    def forget(self, images: Tensor) -> None:
        """Let go of all that are like these."""
        self.memories.pop(_kind(images), None)

    def keep(self, images: Tensor, classes: Tensor, /) -> None:
        """Take in images that were answered; one without an answer (−1) is nothing to learn from."""
        kind, found = _kind(images), classes.tolist()
        known = [place for place, its in enumerate(found) if its >= 0]
        if not known:
            return
        memory = self.memories.pop(kind, None) or Memory(self.least, images)
        self.memories[kind] = memory  # behind all others: it is the newest
        memory.add(images[known], [found[place] for place in known])
        while len(self.memories) > SIZES:
            del self.memories[next(iter(self.memories))]

    def state(self) -> dict[str, Any]:
        """Return all that waits, for a stream that goes on."""
        kept = [
            {"images": memory.images, "classes": list(memory.classes), "new": memory.new}
            for memory in self.memories.values()
        ]
        return {"gather": self.least, "balanced": True, "memories": kept}

    def load(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Go on with the images that waited when a stream was stopped."""
        self.memories = {}
        for kept in state["memories"]:
            images = kept["images"].to(device)
            memory = self.memories[_kind(images)] = Memory(self.least, images)
            memory.add(images, kept["classes"])
            memory.new = kept["new"]


def _kind(images: Tensor) -> tuple[Any, ...]:
    return (*images.shape[1:], images.dtype, images.device)
