"""`offline`: whole target domains over several epochs, on PACS, Office-31 or Office-Home.

    undrift bench offline --data FOLDER --resnet50 FILE --cache FOLDER --fast
    undrift bench offline --set dataset=office31 --data FOLDER --resnet50 FILE

The source network of each domain and seed is trained on 80 % of it (SHOT's recipe), so that the same cells give the
`generalized` table: target accuracy and accuracy on the held-out 20 % of the source.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from undrift_bench.bench.harness.cell import Cell, MethodRow, chosen, seeds_of
from undrift_bench.bench.harness.request import Request
from undrift_bench.bench.harness.run import RunCell
from undrift_bench.bench.harness.store import Store
from undrift_bench.bench.offline import report
from undrift_bench.bench.offline.rows import OF_A_TASK, ablation_rows, offline_rows
from undrift_bench.bench.offline.run import Adapting
from undrift_bench.bench.offline.sets import SETS, DataSet, Task, asked
from undrift_bench.bench.offline.sources import Setup, setup
from undrift_bench.bench.offline.tiny import IMAGES, tiny_setup
from undrift_bench.bench.online.rows import variant


@dataclass(frozen=True)
class Offline:
    """The benchmark; satisfies `undrift_bench.bench.Benchmark`.

    Attributes:
        name: as on the command line.
        make_setup: what cells are made of, for a data set and a request; None takes the real thing, or a tiny stand-in.
    """

    name: str = "offline"
    make_setup: Callable[[DataSet, Request], Setup] | None = None

    @cached_property
    def rows(self) -> list[MethodRow]:
        """The lines of the tables."""
        return offline_rows()

    @cached_property
    def ablation(self) -> list[MethodRow]:
        """The rows of `--only ablation`, which are on a page of their own."""
        return ablation_rows()

    def setup(self, request: Request, dataset: DataSet | None = None) -> Setup:
        """Return what cells are made of."""
        dataset = dataset or asked(request)
        if self.make_setup is not None:
            return self.make_setup(dataset, request)
        return tiny_setup(dataset) if request.tiny else setup(dataset, request)

    def cells(self, request: Request) -> list[Cell]:
        """Return the cells asked for; `--settings` names tasks, and `--tier A` means the main tasks alone."""
        made_of = self.setup(request)
        known = tuple(task.name for task in made_of.dataset.tasks)
        names = request.wanted(known, request.settings or known, "setting")
        tasks = [task for task in made_of.dataset.tasks if task.name in names]
        found = []
        for task in tasks:
            rows = chosen([of_task(row, task) for row in (*self.rows, *self.ablation)], request.only, request.tier)
            found += [cell for row in rows for cell in self.of(made_of, task, row, request)]
        return found

    def of(self, made_of: Setup, task: Task, row: MethodRow, request: Request) -> list[Cell]:
        """Return the cells of one row in one task, one per seed."""
        images = IMAGES if request.tiny else made_of.dataset.images[task.target]
        count = images if request.images is None else min(images, request.images)
        row = of_task(row, task)
        if ":" not in row.method:  # authors' values for this data set, where they give some
            row = replace(row, method=variant(row.method, made_of.dataset.name))
        if (own := OF_A_TASK.get((row.method, task.name))) is not None:  # … and for this very task
            row = replace(row, settings={**own, **row.settings})
        place = (self.name, made_of.network, task.name, row)
        return [Cell(*place, seed, count, request.precision) for seed in seeds_of(row, request.seeds)]

    def shown(self, request: Request) -> list[Cell]:
        """Return every cell that there can be, of all data sets."""
        found = []
        for name in SETS:
            dataset = asked(replace(request, extra={"dataset": name}))
            made_of = self.setup(request, dataset)
            found += [
                c
                for task in dataset.tasks
                for row in (*self.rows, *self.ablation)
                for c in self.of(made_of, task, row, request)
            ]
        return found

    def prepare(self, request: Request) -> RunCell:
        """Return what runs one cell."""
        return Adapting(self.setup(request), request)

    def markdown(self, store: Store, request: Request) -> str:
        """Return the tables."""
        return report.markdown(self, store, request)

    def figures(self, store: Store, request: Request) -> dict[str, Callable[[Path], int]]:
        """Return what draws the figures."""
        return report.figures(self, store, request)


def of_task(row: MethodRow, task: Task) -> MethodRow:
    """Return the row as it runs in a task: in one that is not of the first tier, with one seed."""
    return row if task.main else replace(row, tier="B")


benchmark = Offline()
