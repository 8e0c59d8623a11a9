"""Gather a memory that is balanced over predicted classes, for streams whose classes come in runs.

Norm statistics and losses treat a batch as a sample of the domain. A camera that sees one thing for a while breaks this
assumption, and methods that normalise by such batches are far worse than the source network. So steps use a memory with
the newest images of each predicted class, equally many of each (after NOTE, Gong et al. 2022, and RoTTA, Yuan et al.
2023).
"""

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from undrift.loop.gather import SIZES
from undrift.posterior.outputs import per_image

OLDEST = 16  # times the room of a memory: images that came longer ago are forgotten, outliers among them


@dataclass(frozen=True)
class BalancedMemory:
    """Images of one size: at most `room`, the newest of each class, about as many of each.

    It is immutable. Adding a batch returns a new memory, which is kept once the batch has its answer.

    Attributes:
        room: the most images that it holds.
        images: from the oldest to the newest; None before the first.
        classes: the class that the network predicted for each.
        came: the number of each in the order of arrival.
        count: how many have come.
        new: how many have come since the last step.
    """

    room: int
    images: Tensor | None = None
    classes: tuple[int, ...] = ()
    came: tuple[int, ...] = ()
    count: int = 0
    new: int = 0

    def due(self, more: int) -> bool:
        """Return whether so many more images may fill it, and make half of its room new since the last step."""
        return len(self.classes) + more >= self.room and 2 * (self.new + more) >= self.room

    @property
    def ready(self) -> bool:
        """Whether to make a step: it is due, and no class has more than half of the places.

        A memory of the first run alone would teach the network that run.
        """
        return self.due(0) and 2 * max(Counter(self.classes).values()) <= len(self.classes)

    def added(self, images: Tensor, classes: Tensor) -> "BalancedMemory":
        """Return the memory with these images added; images without an answer (class −1) are left out."""
        per_image(classes[:, None], "balanced=True")
        found = classes.tolist()
        known = [place for place, its in enumerate(found) if its >= 0]
        if not known:
            return self
        classes_ = (*self.classes, *(found[place] for place in known))
        came = (*self.came, *(self.count + place for place in range(len(known))))
        count = self.count + len(known)
        kept = _balanced(classes_, came, self.room, count - OLDEST * self.room)
        before = len(self.classes)
        old, fresh = [p for p in kept if p < before], [known[p - before] for p in kept if p >= before]
        parts = [images.detach()[fresh]] if self.images is None else [self.images[old], images.detach()[fresh]]
        held = torch.cat(parts)
        if images.ndim == 4 and not images.is_contiguous() and images.is_contiguous(memory_format=torch.channels_last):
            held = held.contiguous(memory_format=torch.channels_last)
        chosen = tuple(classes_[p] for p in kept), tuple(came[p] for p in kept)
        return BalancedMemory(self.room, held, *chosen, count, self.new + len(known))


def _balanced(classes: Sequence[int], came: Sequence[int], room: int, since: int) -> list[int]:
    """Return the places that stay: drop what came before `since`, then the oldest of the most frequent class."""
    places: dict[int, list[int]] = {}
    for place, its in enumerate(classes):
        if came[place] >= since:
            places.setdefault(its, []).append(place)
    gone = Counter[int]()
    largest = [(-len(there), there[0], its) for its, there in places.items()]
    heapq.heapify(largest)
    for _ in range(sum(map(len, places.values())) - room):
        size, _, its = largest[0]
        gone[its] += 1
        oldest = places[its][gone[its]] if gone[its] < len(places[its]) else len(classes)
        heapq.heapreplace(largest, (size + 1, oldest, its))
    return sorted(place for its, there in places.items() for place in there[gone[its] :])


class BalancedGather:
    """Gathers images in balanced memories. A full one makes a step each time half of its room is new.

    Attributes:
        least: how many images a memory has room for.
        memories: one for each size, precision and device of images, since a batch holds one kind.
    """

    balanced = True

    def __init__(self, least: int) -> None:
        self.least = least
        self.memories: dict[tuple[Any, ...], BalancedMemory] = {}

    def of(self, images: Tensor) -> BalancedMemory:
        """Return the memory of images like these."""
        return self.memories.get(_kind(images)) or BalancedMemory(self.least)

    def put(self, images: Tensor, memory: BalancedMemory) -> None:
        """Keep a memory of images like these; where many sizes come, the memory kept longest ago is dropped."""
        kind = _kind(images)
        others = [(k, m) for k, m in self.memories.items() if k != kind]
        self.memories = dict([*others[-(SIZES - 1) :], (kind, memory)])

    def learned(self, images: Tensor, memory: BalancedMemory) -> None:
        """Keep the memory that a step was made on; none of its images is new now."""
        self.put(images, replace(memory, new=0))

    def forget(self, images: Tensor) -> None:
        """Drop the memory of images like these."""
        self.memories.pop(_kind(images), None)

    def state(self) -> dict[str, Any]:
        """Return all memories, for a stream that resumes."""
        kept = [
            {name: value for name, value in vars(memory).items() if name != "room"} | {"images": memory.images.clone()}
            for memory in self.memories.values()
            if memory.images is not None
        ]
        return {"gather": self.least, "balanced": True, "memories": kept}

    def load(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Resume with the memories of a stopped stream."""
        self.memories = {}
        for kept in state["memories"]:
            memory = BalancedMemory(self.least, **(dict(kept) | {"images": kept["images"].to(device, copy=True)}))
            assert memory.images is not None
            self.put(memory.images, memory)


def _kind(images: Tensor) -> tuple[Any, ...]:
    return (*images.shape[1:], images.dtype, images.device)
