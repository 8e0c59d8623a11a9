"""`analysis`: measure each choice of VMP, one part per figure of the paper.

    undrift bench analysis --data FOLDER --resnet50 FILE --cache FOLDER --fast          # all parts
    undrift bench analysis … --only prior,layers --settings cifar10-c                   # two parts, the cheap half
    undrift bench analysis … --set task=photo-cartoon --set epochs=5                    # another task, fewer epochs

Offline trials run on one task of PACS (sketch → photo), streams on 1,000 images per corruption of CIFAR-10-C with
WRN-40-2, or 2,000 of CIFAR-100-C with ResNeXt-29. One seed each: differences of less than a point say nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from undrift._errors import OptionError
from undrift_bench.bench.analysis import report
from undrift_bench.bench.analysis.parts import PLACES, TASK, AnalysisPart, Trial, parts
from undrift_bench.bench.analysis.run import IMAGES, STREAMS, Analysing, Planned, task_of
from undrift_bench.bench.harness.cell import Cell
from undrift_bench.bench.harness.request import Request
from undrift_bench.bench.harness.run import RunCell
from undrift_bench.bench.harness.store import Store
from undrift_bench.bench.offline.benchmark import Offline
from undrift_bench.bench.offline.sets import SETS
from undrift_bench.bench.offline.sources import Setup
from undrift_bench.bench.offline.tiny import IMAGES as TINY_IMAGES
from undrift_bench.bench.online.benchmark import TINY_IMAGES as TINY_STREAM


@dataclass(frozen=True)
class Analysis:
    """The benchmark; satisfies `undrift_bench.bench.Benchmark`."""

    name: str = "analysis"

    def setup(self, request: Request) -> Setup:
        """Return what offline trials are made of; `--set epochs=N` shortens every adaptation."""
        pacs = SETS["pacs"].shrunk() if request.tiny else SETS["pacs"]
        task = request.extra.get("task", TASK)
        known = [t.name for t in pacs.tasks]
        if task not in known:
            raise OptionError(f"there is no task {task!r}; needed: one of {', '.join(known)}. Choose one.")
        made_of = Offline().setup(request, pacs)
        return made_of if (epochs := _epochs(request)) is None else replace(made_of, epochs=epochs)

    def planned(self, request: Request, only: tuple[str, ...] = (), places: tuple[str, ...] = PLACES) -> list[Planned]:
        """Return the trials of some parts (of all where none is named) with their cells."""
        made_of = self.setup(request)
        return [
            Planned(part, trial, self._cell(made_of, part, trial, request))
            for part in parts(request.tiny).values()
            if not only or part.name in only
            for trial in part.trials
            if trial.where in places
        ]

    def cells(self, request: Request) -> list[Cell]:
        """Return the cells asked for: `--only` names parts, `--settings` the data they run on."""
        only = request.wanted(tuple(parts()), request.only, "part") if request.only else ()
        places = request.wanted(PLACES, request.settings or PLACES, "setting")
        return [] if request.tier == "A" else [p.cell for p in self.planned(request, only, places)]

    def shown(self, request: Request) -> list[Cell]:
        """Return every cell of this task and these epochs."""
        return [p.cell for p in self.planned(request)]

    def prepare(self, request: Request) -> RunCell:
        """Return what runs one cell."""
        return Analysing(self.setup(request), request, self.planned(request))

    def markdown(self, store: Store, request: Request) -> str:
        """Return the tables."""
        return report.markdown(self.planned(request), store)

    def figures(self, store: Store, request: Request) -> dict[str, Callable[[Path], int]]:
        """Return what draws a figure for each part that has numbers."""
        return report.figures(self.planned(request), store)

    def _cell(self, made_of: Setup, part: AnalysisPart, trial: Trial, request: Request) -> Cell:
        if trial.where == "pacs":
            task = made_of.dataset.task(task_of(trial, request))
            count = TINY_IMAGES if request.tiny else made_of.dataset.images[task.target]
            network, place = made_of.network, task.name
            if (epochs := _epochs(request)) is not None:
                place = f"{epochs} epochs {place}"
        else:
            count = TINY_STREAM if request.tiny else IMAGES[trial.where]
            network, place = "tiny" if request.tiny else STREAMS[trial.where].networks[0].name, trial.where
        count = count if request.images is None else min(count, request.images)
        row = replace(trial.row, loop="adapt" if trial.where == "pacs" else "stream")
        return Cell(self.name, network, f"{part.name} {place}", row, 0, count, request.precision)


def _epochs(request: Request) -> int | None:
    text = request.extra.get("epochs")
    if text is not None and (not text.isdigit() or int(text) < 1):
        raise OptionError(f"epochs={text!r} is not a whole number from 1 up. Leave it out for each method's own.")
    return None if text is None else int(text)


benchmark = Analysis()
