"""One data set's finished cells, for the offline and generalized tables."""

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from undrift_bench.bench.harness.cell import Cell, MethodRow
from undrift_bench.bench.harness.notes import row_lines
from undrift_bench.bench.harness.published import Published
from undrift_bench.bench.harness.request import Request
from undrift_bench.bench.harness.store import Record, Store
from undrift_bench.bench.harness.table import FAILED, NOT_MEASURED, NOT_RUN, spread
from undrift_bench.bench.offline.sets import SETS, DataSet, Task, asked, paper_row

if TYPE_CHECKING:
    from undrift_bench.bench.offline.benchmark import Offline


class Page:
    """The cells of one data set.

    Attributes:
        main: the tasks of the first tier; `tasks` is all of them.
    """

    def __init__(self, bench: "Offline", store: Store, request: Request, dataset: DataSet) -> None:
        self.bench, self.store, self.request, self.dataset = bench, store, request, dataset
        self.setup = bench.setup(request, dataset)
        self.tasks = self.setup.dataset.tasks
        self.main = tuple(task for task in self.tasks if task.main)

    def cells(self, row: MethodRow, task: Task) -> list[Cell]:
        """Return the cells of one row in one task, one per seed."""
        return self.bench.of(self.setup, task, row, self.request)

    def records(self, row: MethodRow, task: Task) -> list[Record]:
        """Return what is finished of them."""
        return self.store.all(self.cells(row, task))

    def of_row(self, row: MethodRow, tasks: Sequence[Task] | None = None) -> list[Record]:
        """Return what is finished of a row, task by task; of all tasks where none are named."""
        return [record for task in (self.tasks if tasks is None else tasks) for record in self.records(row, task)]

    def all(self) -> list[Record]:
        """Return everything that is finished."""
        return [record for row in self.bench.rows for record in self.of_row(row)]

    def failures(self) -> dict[str, str]:
        """Return for each row of which something failed how often it did, and the first message."""
        found: dict[str, list[str]] = {}
        for row in self.bench.rows:
            for task in self.tasks:
                for cell in self.cells(row, task):
                    record = self.store.get(cell)
                    if record is not None and "failed" in record:
                        found.setdefault(row.label, []).append(f"({task.title}): {record['failed']}")
        return {row: f"in {len(where)} cells, the first {where[0]}" for row, where in found.items()}

    def done(self, row: MethodRow, tasks: Sequence[Task]) -> list[Task]:
        """Return the tasks of which a row has at least one finished cell."""
        return [task for task in tasks if self.records(row, task)]

    def measured(self, row: MethodRow, tasks: Sequence[Task], name: str) -> list[Task]:
        """Return those of which a row has one number at least: a finished cell may lack it, or have it withdrawn."""
        return [task for task in tasks if _known(self.records(row, task), name)]

    def by_seed(self, row: MethodRow, tasks: Sequence[Task], name: str) -> dict[int, float]:
        """Return the mean over tasks of one number, for each seed; nothing where a seed lacks a task.

        With some seeds left out it would be another mean than that of the numbers a page has for each task.
        """
        found: dict[int, list[float]] = {}
        for task in tasks:
            for record in self.records(row, task):
                if record.get(name) is not None:
                    found.setdefault(record["seed"], []).append(record[name])
        whole = all(len(numbers) == len(tasks) for numbers in found.values())
        return {seed: statistics.fmean(numbers) for seed, numbers in found.items()} if whole else {}

    def means(self, row: MethodRow, tasks: Sequence[Task], name: str) -> list[float]:
        """Return these means alone."""
        return list(self.by_seed(row, tasks, name).values())

    def text(self, row: MethodRow, tasks: Sequence[Task], name: str, scale: float = 100.0, digits: int = 2) -> str:
        """Return a mean over tasks with its deviation over seeds; with tasks missing, it says of how many it is."""
        if not self.done(row, tasks):
            failed = any(self.store.state(cell) == "failed" for task in tasks for cell in self.cells(row, task))
            return FAILED if failed else NOT_RUN
        known = self.measured(row, tasks, name)
        if not known:
            return NOT_MEASURED
        numbers = self.means(row, known, name) or [self.of_any_seed(row, known, name)]
        return spread(numbers, scale, digits) + of_tasks(known, tasks)

    def of_any_seed(self, row: MethodRow, tasks: Sequence[Task], name: str) -> float:
        """Return the mean over tasks of one number, in each by the seeds that have it."""
        return statistics.fmean(statistics.fmean(_known(self.records(row, task), name)) for task in tasks)

    def numbers(self, row: MethodRow, task: Task, names: Sequence[str]) -> str:
        """Return several numbers of one task in per cent, each with its deviation over seeds."""
        records = self.records(row, task)
        if not records:
            return FAILED if any(self.store.state(cell) == "failed" for cell in self.cells(row, task)) else NOT_RUN
        found = (_known(records, name) for name in names)
        return " / ".join(spread(known, 100, 1) if known else NOT_MEASURED for known in found)

    def paper(self, row: MethodRow) -> Published | None:
        """Return what the paper printed of a row."""
        return None if row.control else self.dataset.published.get(paper_row(row.name))

    def place(self, task: Task) -> int:
        """Return which of the paper's columns a task is: a tiny stand-in has fewer tasks than the paper's table."""
        return SETS[self.dataset.name].tasks.index(task)

    def complete(self, tasks: Sequence[Task]) -> bool:
        """Return whether these are all of the data set's tasks: the paper's means are over these, and over no fewer."""
        return len(tasks) == len(SETS[self.dataset.name].tasks)

    def compared(self, name: str = "accuracy") -> tuple[list[MethodRow], list[Task]]:
        """Return rows and tasks between which no cell lacks a number, for a picture in which all means compare.

        Tasks: the main ones, those of one of the main rows, or those that all of them have, whichever shows the most
        cells, each seed counted; rows: those that have all these tasks.
        """
        begun = [row for row in self.bench.rows if self.measured(row, self.tasks, name)]
        leading = [row for row in begun if row.tier == "A" and not row.control] or begun
        own = [self.measured(row, self.tasks, name) for row in leading]
        shared = [task for task in self.tasks if own and all(task in tasks for tasks in own)]
        choices = [shared, *own, list(self.main)]
        whole = [[row for row in begun if self.measured(row, tasks, name) == tasks] for tasks in choices]

        def cells(shown: tuple[list[MethodRow], list[Task]]) -> int:
            rows, tasks = shown
            return sum(len(tasks) * max(len(self.by_seed(row, tasks, name)), 1) for row in rows)

        return max(zip(whole, choices, strict=True), key=cells)


def pages(bench: "Offline", store: Store, request: Request) -> list[Page]:
    """Return a page for the data set that was asked for, and for every other one of which something is finished."""
    wanted = asked(request).name
    found = []
    for name, dataset in SETS.items():
        page = Page(bench, store, request, dataset.shrunk() if request.tiny else dataset)
        if name == wanted or page.all():
            found.append(page)
    return found


def untouched(bench: "Offline", store: Store, request: Request) -> list[Page]:
    """Return a page for each data set that the paper has a table of and that `pages` leaves out."""
    there = {page.dataset.name for page in pages(bench, store, request)}
    left = (
        () if request.tiny else [dataset for name, dataset in SETS.items() if dataset.published and name not in there]
    )
    return [Page(bench, store, request, dataset) for dataset in left]


def of_tasks(known: Sequence[Task], tasks: Sequence[Task]) -> str:
    """Return what stands behind a mean that some tasks are left out of; nothing where none is."""
    return "" if len(known) == len(tasks) else f" ({len(known)} of {len(tasks)} tasks)"


def _known(records: Sequence[Record], name: str) -> list[float]:
    return [record[name] for record in records if record.get(name) is not None]


def title(row: MethodRow) -> str:
    """Return what tables call a row; a control stands aside."""
    return f"*{row.label}*" if row.control else row.label


def notes(rows: Sequence[MethodRow]) -> list[str]:
    """Return a line for each control (what it asks, with which settings), then what the rows' readers have to know."""
    controls = [
        f"{row.label}: a control; {row.why} It runs `{row.method}` with "
        + ", ".join(f"{name} {value}" for name, value in row.settings.items())
        + "."
        for row in rows
        if row.control
    ]
    return controls + row_lines(rows)
