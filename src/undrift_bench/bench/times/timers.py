"""Time one row of a table: the first batches of its stream, or the first steps of its adaptation.

Only what these need is loaded: one corruption and enough images, no scores, no clean images at the end.
"""

import gc
import math
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Protocol

from torch import nn

from undrift._errors import UndriftError
from undrift_bench.bench.harness.cell import Cell
from undrift_bench.bench.harness.measure import Clock
from undrift_bench.bench.harness.quickly import quickly
from undrift_bench.bench.harness.request import CannotRun
from undrift_bench.bench.offline.run import Adapting
from undrift_bench.bench.offline.sources import Sources, shot_network
from undrift_bench.bench.offline.views import StopWatch
from undrift_bench.bench.online.settings import StreamSetting
from undrift_bench.bench.online.streaming import Streaming
from undrift_bench.zoo.gsfda import masked

BATCHES = 25  # the first third is a warm-up


@dataclass(frozen=True)
class Taken:
    """The time per batch, how many batches it is the median of, and what a reader of it has to know."""

    milliseconds: float | None
    batches: int
    note: str = ""


class Timer(Protocol):
    """Times a cell, and says which cells are one line."""

    def line(self, cell: Cell) -> Hashable:
        """Return what the cells of one line of a table have in common."""

    def __call__(self, cell: Cell) -> Taken:
        """Return the time per batch of a cell."""


class StreamTimer:
    """Times streams: a line is a row of one network in one setting."""

    def __init__(self, streaming: Streaming) -> None:
        benchmark, request = streaming.benchmark, streaming.request
        # The first batches of a stream are of its first corruption. They are not cached: cells have more images.
        first = replace(benchmark, corruptions=benchmark.corruptions[:1])
        self.streaming = Streaming(first, replace(request, cache=None))

    def line(self, cell: Cell) -> Hashable:
        """Return network, setting and row."""
        return cell.network, cell.setting, cell.row.name

    def __call__(self, cell: Cell) -> Taken:
        """Return the time from a batch that lies on the device to its answer."""
        streaming = self.streaming
        setting = self._setting(cell)
        assert setting.batch is not None
        if setting.gather is not None:
            raise CannotRun(
                f"{setting.name} makes a step every {setting.gather} images, and the first {BATCHES} are timed; their "
                "time would be an answer's alone. Time another setting."
            )
        given = streaming.given(cell, setting)
        streaming.network(cell.network)
        feed = streaming.feed(replace(cell, images=BATCHES * setting.batch), setting)
        # Where there are too few images, they come again.
        feed.plan = replace(feed.plan, batches=list(islice(cycle(feed.plan.batches), BATCHES)))
        gc.collect()  # hooks make circles: the last line's network must not be freed while this one is timed
        clock = Clock(streaming.device, BATCHES)
        with quickly(streaming.device, streaming.request.fast):
            stream = streaming.begin(cell, feed, given)
            for _ in feed.batches():
                clock(lambda: next(stream))
        return Taken(clock.milliseconds, clock.count)

    def _setting(self, cell: Cell) -> StreamSetting:
        """Return the cell's setting, with its first severity alone and batches as large as the cell's."""
        benchmark = self.streaming.benchmark
        found = next(s for s in benchmark.settings if s.name == cell.setting)
        batch = min(found.batch or benchmark.batch, cell.images)
        return replace(found, severities=found.severities[:1], batch=batch)


class StepTimer:
    """Times adaptations: a line is a row, as a step takes as long in every task."""

    def __init__(self, adapting: Adapting) -> None:
        self.adapting = adapting
        adapting.sources = self.sources = Shapes(adapting.setup, adapting.images, adapting.request)

    def line(self, cell: Cell) -> Hashable:
        """Return network and row."""
        return cell.network, cell.row.name

    def __call__(self, cell: Cell) -> Taken:
        """Return the time of a step with its random crops; the target is whole, as some methods keep all of it."""
        adapting = self.adapting
        task = adapting.setup.dataset.task(cell.setting)
        recipe, epochs = adapting.recipe(cell)
        source, target = adapting.source(cell, task), adapting.images(task.target)
        steps = epochs * math.ceil(len(target) / recipe.batch_size)
        watch = StopWatch(adapting.device, min(BATCHES, steps))
        gc.collect()
        with quickly(adapting.device, adapting.request.fast), suppress(_Enough):
            adapting.adapted(cell, source, target, _until(watch))
        return Taken(watch.milliseconds, watch.count, self.sources.note)


class Shapes(Sources):
    """Source networks to be timed: the trained one where there is one, else one that only starts like it.

    Minutes of training would change the numbers in a step, not how many there are.

    Attributes:
        note: what has to be said of the network that was asked for last.
    """

    note = ""

    def network(self, domain: str, seed: int, masks: bool = False) -> nn.Module:
        """Return the network, in eval mode on the CPU."""
        self.note = "" if self._place(domain, seed, masks).is_file() else "source network not trained"
        key = (domain, seed, masks)
        if self.note and key not in self._networks:
            trunk = self._trunk() if self.setup.make is None else None
            name = self.setup.options.network if trunk is None else shot_network(trunk)
            fresh = self._fresh(len(self.images(domain).class_names), seed, trunk, name)
            self._networks[key] = (masked(fresh) if masks else fresh).eval()
        return super().network(domain, seed, masks)


class _Enough(UndriftError):
    """Ends an adaptation whose first steps were asked for alone."""


def _until(watch: StopWatch) -> Callable[[], None]:
    """Return what calls the watch before each batch and ends the adaptation after so many whole steps."""
    asked = 0

    def each() -> None:
        nonlocal asked
        watch()
        if asked == BATCHES:
            raise _Enough
        asked += 1

    return each
