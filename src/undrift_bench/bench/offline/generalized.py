"""`generalized`: accuracy on target and source after adaptation, from `offline`'s cells.

One run gives both tables: a cell of `offline` holds the accuracy on the target and on the 20 % of the source that its
source network was not trained on.
"""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from undrift.judge.metrics import harmonic_mean
from undrift_bench.bench.harness import figure
from undrift_bench.bench.harness.cell import Cell, MethodRow
from undrift_bench.bench.harness.published import PAPER
from undrift_bench.bench.harness.request import Request
from undrift_bench.bench.harness.run import Outcome, RunCell, Say, about, run, tables, write
from undrift_bench.bench.harness.store import Store
from undrift_bench.bench.harness.table import NOT_MEASURED, marked, spread
from undrift_bench.bench.harness.table import markdown as table
from undrift_bench.bench.offline.benchmark import Offline
from undrift_bench.bench.offline.benchmark import benchmark as offline
from undrift_bench.bench.offline.page import Page, notes, of_tasks, pages, title
from undrift_bench.bench.offline.report import COSTS, below, costs, drawn, score_titles, scores
from undrift_bench.bench.offline.sets import Task, paper_row


class Generalized:
    """Source, target and their harmonic mean, per task; `cells_of` is the benchmark whose cells are read."""

    def __init__(self, cells_of: Offline = offline) -> None:
        self.cells_of = cells_of

    def __call__(self, request: Request, say: Say = print, quiet: bool = False) -> Outcome:
        """Run what is missing of `offline`, and write both pages."""
        return self._and_own(run(self.cells_of, request, say, quiet), request)

    def tables(self, request: Request) -> Outcome:
        """Write both pages from the cells that are there, and run none."""
        return self._and_own(tables(self.cells_of, request), request)

    def _and_own(self, outcome: Outcome, request: Request) -> Outcome:
        wrote = outcome.wrote
        write(_Tables(self.cells_of), Store(request.results / self.cells_of.name), request, outcome)
        outcome.wrote = wrote + outcome.wrote
        return outcome


class _Tables:
    """The generalized page, as `undrift_bench.bench.harness.run` writes pages."""

    def __init__(self, bench: Offline) -> None:
        self.bench, self.name = bench, "generalized"

    def cells(self, request: Request) -> list[Cell]:
        return self.bench.cells(request)

    def shown(self, request: Request) -> list[Cell]:
        return self.bench.shown(request)

    def prepare(self, request: Request) -> RunCell:
        return self.bench.prepare(request)

    def markdown(self, store: Store, request: Request) -> str:
        return markdown(self.bench, store, request)

    def figures(self, store: Store, request: Request) -> dict[str, Callable[[Path], int]]:
        return figures(self.bench, store, request)


def harmonics(page: Page, row: MethodRow, tasks: Sequence[Task]) -> tuple[list[float], list[float]]:
    """Return, for each seed, the mean of the tasks' harmonic means, and the harmonic mean of the tasks' means.

    They differ: the first is low where one task is bad on either side, the second where one side is bad on average.
    `undrift.Report` gives both, too.
    """
    sources, targets = (page.by_seed(row, tasks, name) for name in ("source_accuracy", "accuracy"))
    both = [(source, targets[seed]) for seed, source in sources.items() if seed in targets]
    return page.means(row, tasks, "harmonic"), [harmonic_mean(pair) for pair in both]


def markdown(bench: Offline, store: Store, request: Request) -> str:
    """Return, for each data set, a table of means and one by task."""
    text = ["# Generalized adaptation: the target, and what is left of the source\n"]
    for page in pages(bench, store, request):
        text += [f"## {page.dataset.title}\n", about(page.all()) + "\n"]
        whole = any(len(page.done(row, page.tasks)) == len(page.tasks) for row in bench.rows)
        for tasks in [page.main] if page.main == page.tasks or not whole else [page.main, page.tasks]:
            text += [f"Means over {len(tasks)} of {len(page.tasks)} tasks:\n", _summary(page, tasks) + "\n"]
        text += ["Held-out source / target / harmonic mean, accuracy % by task:\n", _by_task(page), *below(page)]
    protocol = (
        "Mean ± standard deviation over seeds; over tasks with different numbers of them, of each task's own mean and "
        "without deviation. Source networks are trained on 80 % of the source, and asked about the "
        "other 20 % after adaptation. Nothing tells the network which images are the source's; only G-SFDA is told, "
        "which has a feature mask for each. NLL and ECE are of the target; time, memory, learnables and file as in "
        "offline.md."
    )
    harmonic = (
        "Mean of harmonics: each task's harmonic mean, then their mean. Harmonic of means: the harmonic mean of the "
        "first two columns."
    )
    paper = (
        f"Published values are from {PAPER}, which prints means over tasks only and does not say which of the two "
        "means its last column is; 2·S·T/(S + T) of its own columns gives what it prints."
    )
    return "\n".join([*text, *(f"- {line}" for line in (protocol, harmonic, paper, *notes(bench.rows)))]) + "\n"


def figures(bench: Offline, store: Store, request: Request) -> dict[str, Callable[[Path], int]]:
    """Return what draws a figure for each data set that has numbers: the harmonic mean, by task."""
    what = "harmonic mean of source and target"
    return drawn(pages(bench, store, request), what, "harmonic mean %", _mark, "harmonic")


def _summary(page: Page, tasks: Sequence[Task]) -> str:
    paper = page.dataset.generalized
    header = ["method", "source %", "target %", "mean of harmonics %", "harmonic of means %"]
    titles = score_titles([record for row in page.bench.rows for record in page.of_row(row, tasks)])
    header += [*(["published S / T / H"] if paper else []), *titles, *COSTS]
    rows = []
    for row in page.bench.rows:
        records = page.of_row(row, tasks)
        line = [marked(title(row), records)]
        line += [page.text(row, tasks, name) for name in ("source_accuracy", "accuracy", "harmonic")]
        line.append(_of_means(page, row, tasks))
        if paper:
            said = None if row.control else paper.get(paper_row(row.name))
            line.append("–" if said is None else " / ".join(f"{value:.1f}" for value in said))
        line += [*scores(page, row, tasks, titles), *costs(records)] if records else [""] * (len(header) - len(line))
        rows.append(line)
    return table(header, rows)


def _by_task(page: Page) -> str:
    three = ("source_accuracy", "accuracy", "harmonic")
    rows = [[title(row), *(page.numbers(row, task, three) for task in page.tasks)] for row in page.bench.rows]
    return table(["method", *(task.title for task in page.tasks)], rows)


def _of_means(page: Page, row: MethodRow, tasks: Sequence[Task]) -> str:
    """Return the harmonic mean of the means over the tasks that have both, and of how many tasks that is."""
    known = page.measured(row, tasks, "harmonic")
    if not known:
        return NOT_MEASURED if page.done(row, tasks) else ""
    _, numbers = harmonics(page, row, known)
    sides = [page.of_any_seed(row, known, name) for name in ("source_accuracy", "accuracy")]
    return spread(numbers or [harmonic_mean(sides)], 100) + of_tasks(known, tasks)


def _mark(page: Page, row: MethodRow, tasks: Sequence[Task]) -> figure.BarMark:
    by_task = {t.title: 100 * page.of_any_seed(row, [t], "harmonic") for t in tasks}
    numbers = [100 * n for n in page.means(row, tasks, "harmonic")] or [statistics.fmean(by_task.values())]
    known = page.complete(tasks) and not row.control
    said = page.dataset.generalized.get(paper_row(row.name)) if known else None
    return figure.BarMark(row.label, numbers, None if said is None else said[2], row.control, by_task)


benchmark = Generalized()
