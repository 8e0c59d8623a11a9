"""The kinds of stream: which corrupted images, in which order, in which batches."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from undrift_bench.bench.online.corrupted import Kind

Arrival = Literal["domain by domain", "mixed", "class by class"]
UP_AND_DOWN = (1, 2, 3, 4, 5, 4, 3, 2, 1)


@dataclass(frozen=True)
class StreamSetting:
    """One way of streaming.

    Attributes:
        name: as in `--settings`.
        title: what tables call it.
        arrival: how the images of a stream follow each other.
        severities: a corruption passes through, one after another.
        images: of each domain and severity, at most; None takes the benchmark's number.
        batch: None takes the benchmark's.
        episodic: every batch starts from the source network.
        gather: images that a step waits for; None makes one step per batch.
        balanced: these are a memory with as many of each predicted class.
        cycles: how often the corruptions come, one after another.
    """

    name: str
    title: str
    arrival: Arrival = "domain by domain"
    severities: tuple[int, ...] = (5,)
    images: int | None = None
    batch: int | None = None
    episodic: bool = False
    gather: int | None = None
    balanced: bool = False
    cycles: int = 1

    @property
    def of_sizes(self) -> bool:
        """Whether it asks about the size of a batch, and about nothing else."""
        once = self.arrival == "domain by domain" and self.cycles == 1
        return self.batch is not None and self.gather is None and once

    def kinds(self, corruptions: Sequence[str]) -> list[Kind]:
        """Return the corruptions and severities that have to be made, each once."""
        return [(name, severity) for name in corruptions for severity in sorted(set(self.severities))]


CONTINUAL = StreamSetting("continual", "one corruption after another, never reset")
BATCHES = (1, 4, 16, 64, 200)
# With ten classes four batches each.
RUNS = StreamSetting(
    "classes-2000",
    "one class after another, 2,000 images in batches of 50",
    "class by class",
    images=2000,
    batch=50,
)
SETTINGS = (
    CONTINUAL,
    StreamSetting("episodic", "reset before every batch", episodic=True),
    StreamSetting("gradual", "severity 1→5→1, 2,000 images a step", severities=UP_AND_DOWN, images=2000),
    StreamSetting("mixed", "all corruptions shuffled together", "mixed"),
    StreamSetting("classes", "one class after another in each corruption", "class by class"),
    *(StreamSetting(f"batch-{size}", f"batches of {size}, 1,000 images", images=1000, batch=size) for size in BATCHES),
    StreamSetting("gather-64", "one image at a time, steps on 64, 1,000 images", images=1000, batch=1, gather=64),
    RUNS,
    replace(
        RUNS,
        name="balanced-128",
        title="one class after another, 2,000 images in batches of 50, steps on a balanced memory of 128",
        gather=128,
        balanced=True,
    ),
    # Long streams are usually asked in batches of 64; ten of each corruption keep a cell within ten minutes of a GPU.
    StreamSetting("cycles-20", "all corruptions twenty times over, 640 images", images=640, batch=64, cycles=20),
)


@dataclass(frozen=True)
class StreamPlan:
    """A stream laid out before it runs.

    Attributes:
        kind: for each image of the stream, its place among `StreamSetting.kinds`.
        image: its place in the data set.
        domain: the number of its corruption.
        cycle: how often every corruption has come before.
        batches: begin and end of each batch.
    """

    kind: Tensor
    image: Tensor
    domain: Tensor
    cycle: Tensor
    batches: list[tuple[int, int]]


def plan(
    setting: StreamSetting, corruptions: Sequence[str], labels: Tensor, count: int, batch: int, seed: int
) -> StreamPlan:
    """Return which image comes when.

    Seed 0 leaves the order of the files; another permutes the images of each corruption anew, in every cycle. Mixed
    domains are shuffled with every seed.
    """
    generator = torch.Generator().manual_seed(seed)
    kinds = {kind: place for place, kind in enumerate(setting.kinds(corruptions))}
    parts: list[tuple[Tensor, ...]] = []
    places = itertools.product(range(setting.cycles), enumerate(corruptions), setting.severities)
    for cycle, (number, name), severity in places:
        order = torch.randperm(count, generator=generator) if seed else torch.arange(count)
        if setting.arrival == "class by class":
            order = order[labels[order].argsort(stable=True)]
        parts.append((order, *(torch.full((count,), n) for n in (kinds[name, severity], number, cycle))))
    image, kind, domain, cycle_of = (torch.cat(column) for column in zip(*parts, strict=True))
    if setting.arrival == "mixed":
        shuffled = torch.randperm(len(image), generator=generator)
        image, kind, domain, cycle_of = (each[shuffled] for each in (image, kind, domain, cycle_of))
        ends = [0, len(image)]
    else:
        ends = list(range(0, len(image) + 1, count))  # a batch never spans two domains
    batches = [
        (start, min(start + batch, end))
        for begin, end in itertools.pairwise(ends)
        for start in range(begin, end, batch)
    ]
    return StreamPlan(kind, image, domain, cycle_of, batches)
