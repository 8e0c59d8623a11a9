"""Tables and figures of the offline benchmark."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from undrift import methods
from undrift_bench.bench.harness import figure
from undrift_bench.bench.harness.cell import MethodRow
from undrift_bench.bench.harness.published import PAPER, SOURCE_USING, Published
from undrift_bench.bench.harness.request import Request
from undrift_bench.bench.harness.run import about
from undrift_bench.bench.harness.store import Record, Store
from undrift_bench.bench.harness.table import (
    AUGRC,
    AURC,
    Column,
    footnotes,
    in_use,
    marked,
    median,
    several_sources,
    size,
)
from undrift_bench.bench.harness.table import markdown as table
from undrift_bench.bench.harness.timed import how_timed
from undrift_bench.bench.offline.page import Page, notes, pages, title, untouched
from undrift_bench.bench.offline.sets import Task

if TYPE_CHECKING:
    from undrift_bench.bench.offline.benchmark import Offline

ASIDE = "published, not run"
COST = (
    median("ms a batch", "milliseconds"),
    median("peak MiB", "peak_mib", 0),
    median("learnables", "learnables", 0),
    Column("file", lambda record: record.get("file_bytes"), size),
)
COSTS = (*(column.title for column in COST), "cells")


def markdown(bench: "Offline", store: Store, request: Request) -> str:
    """Return the tables of each data set: means and costs, then accuracy by task."""
    text = ["# Offline adaptation: whole target domains, last epoch\n"]
    for page in pages(bench, store, request):
        text += [f"## {page.dataset.title}\n", about(page.all()) + "\n", _summary(page)]
        text += [
            "\nAccuracy % on the target by task" + (", the paper's in brackets" if _has_paper(page) else "") + ":\n"
        ]
        text += [_by_task(page), *below(page)]
    text += [part for page in untouched(bench, store, request) for part in _published(page)]
    text.append(_notes(bench))
    return "\n".join(text)


def figures(bench: "Offline", store: Store, request: Request) -> dict[str, Callable[[Path], int]]:
    """Return what draws a figure for each data set that has numbers."""
    return drawn(pages(bench, store, request), "target accuracy", "accuracy %", _mark, "accuracy")


def drawn(
    found: Iterable[Page],
    what: str,
    axis: str,
    mark: Callable[[Page, MethodRow, list[Task]], figure.BarMark],
    name: str,
) -> dict[str, Callable[[Path], int]]:
    """Return what draws a figure of one number for each page that has it, by the end of its file's name."""
    out: dict[str, Callable[[Path], int]] = {}
    for page in found:
        rows, tasks = page.compared(name)
        if rows:
            marks = [mark(page, row, tasks) for row in rows]
            title = f"{page.dataset.title}: {what}, {len(tasks)} of {len(page.tasks)} tasks"
            heading = figure.finding(marks, title, less_is_better=False)
            ending = "" if page.dataset.name == "pacs" else f"-{page.dataset.name}"
            out[ending] = partial(figure.overview, title=heading, marks=marks, axis=axis)
    return out


def score_titles(records: Sequence[Record]) -> list[str]:
    """Return the headings over `scores` in a table of these records: AURC and AUGRC only if one of them has it."""
    return ["NLL", "ECE %", *(column.title for column in in_use([AURC, AUGRC], records))]


def scores(page: Page, row: MethodRow, tasks: Sequence[Task], titles: Sequence[str]) -> list[str]:
    """Return the cells below a table's `titles`: means over tasks."""
    found = [page.text(row, tasks, "nll", 1, 3), page.text(row, tasks, "ece", 100, 1)]
    areas = {AURC.title: "aurc", AUGRC.title: "augrc"}
    return [*found, *(page.text(row, tasks, name) for column, name in areas.items() if column in titles)]


def costs(records: Sequence[Record]) -> list[str]:
    """Return the cells under `COSTS` for the records of a row."""
    return [*(column.text(records) for column in COST), str(len(records))]


def below(page: Page) -> list[str]:
    """Return the lines under a data set's tables: what failed, what was noted and warned of, how times were taken."""
    by_row = {row.label: page.of_row(row) for row in page.bench.rows}
    # G-SFDA's source network has masks, and is trained by itself: another one by design.
    alike = {row.label: by_row[row.label] for row in page.bench.rows if not methods.get(row.method).needs}
    failed = [f"- {row} failed {where}" for row, where in page.failures().items()]
    note = [f"\n{page.dataset.note}\n"] if page.dataset.note else []
    return failed + footnotes(by_row) + several_sources(alike) + how_timed(by_row) + note


def _summary(page: Page) -> str:
    groups = {f"{len(page.main)} main tasks": page.main} if len(page.main) < len(page.tasks) else {}
    groups |= {f"all {len(page.tasks)} tasks": page.tasks}
    titles = score_titles(page.all())
    header = ["method", *(f"accuracy %, {name}" for name in groups)]
    header += (["published %"] if _has_paper(page) else []) + [*titles, "held-out source %", *COSTS]
    rows = [_source_using(page, name, len(header), len(groups)) for name in _uses_source(page)]
    for row in page.bench.rows:
        tasks = page.main if page.done(row, page.main) else page.tasks
        records = page.of_row(row)
        line = [marked(title(row), records), *(page.text(row, group, "accuracy") for group in groups.values())]
        if _has_paper(page):
            said = page.paper(row)
            line.append("–" if said is None else str(said))
        if records:
            line += [*scores(page, row, tasks, titles), page.text(row, tasks, "source_accuracy"), *costs(records)]
        else:
            line += [""] * (len(header) - len(line))
        rows.append(line)
    return table(header, rows)


def _published(page: Page) -> list[str]:
    """Return the paper's table of a data set of which nothing was run, in its shape."""
    how = f"Not run here; with its images: `undrift bench offline --set dataset={page.dataset.name}`. "
    how += "Accuracy % by task, the paper's in brackets:"
    return [f"\n## {page.dataset.title}\n", f"{how}\n", _by_task(page, [r for r in page.bench.rows if page.paper(r)])]


def _source_using(page: Page, name: str, width: int, groups: int) -> list[str]:
    line = [f"{name} (uses source data)", *([ASIDE] * groups), str(page.dataset.published[name])]
    return line + [""] * (width - len(line))


def _by_task(page: Page, of: Sequence[MethodRow] | None = None) -> str:
    header = ["method", *(task.title for task in page.tasks), "Mean"]
    said = page.dataset.published
    rows = [[f"{name} ({ASIDE})", *_in_brackets(page, said[name])] for name in _uses_source(page)]
    for row in page.bench.rows if of is None else of:
        ours = [page.numbers(row, task, ["accuracy"]) for task in page.tasks]
        ours.append(page.text(row, page.tasks, "accuracy", digits=1))
        both = zip(ours, _in_brackets(page, page.paper(row)), strict=True)
        rows.append([title(row), *(f"{mine} {paper}".rstrip() for mine, paper in both)])
    return table(header, rows)


def _in_brackets(page: Page, said: Published | None) -> list[str]:
    """Return what the paper prints for each task of the page, and its mean where the page has all its tasks."""
    if said is None:
        return [""] * (len(page.tasks) + 1)
    mean = f"({said})" if page.complete(page.tasks) else ""
    return [*(f"({said.domains[page.place(task)]:.1f})" for task in page.tasks), mean]


def _uses_source(page: Page) -> list[str]:
    """Return the methods that look at source data, in the order of the paper's table."""
    return [name for name in page.dataset.published if name in SOURCE_USING]


def _has_paper(page: Page) -> bool:
    return bool(page.dataset.published)


def _mark(page: Page, row: MethodRow, tasks: list[Task]) -> figure.BarMark:
    domains = {task.title: 100 * page.of_any_seed(row, [task], "accuracy") for task in tasks}
    numbers = [100 * n for n in page.means(row, tasks, "accuracy")] or [statistics.fmean(domains.values())]
    said = page.paper(row) if page.complete(tasks) else None
    return figure.BarMark(row.label, numbers, None if said is None else said.value, row.control, domains)


def _notes(bench: "Offline") -> str:
    protocol = (
        "Mean ± standard deviation over seeds, of means over tasks. The last epoch counts; no label of the target "
        "chooses anything. Source networks are trained on 80 % of the source by SHOT's recipe (its own split is 90 to "
        "10), the best epoch by the other 20 %, on which the held-out source accuracy is measured after adaptation. A "
        "seed has its own split, source network, order and noise."
    )
    costs = (
        "Time is the median of a step with its random crops, memory the peak without the images. A task that was not "
        "run is left out of a mean, which says so. Where tasks have different numbers of seeds, a mean over them is of "
        "each task's own mean, and has no deviation."
    )
    aside = (
        f"{', '.join(SOURCE_USING)} look at source data while they adapt: {ASIDE}; their values, and those in "
        f"brackets, are from {PAPER}."
    )
    return "\n".join(f"- {line}" for line in (protocol, costs, aside, *notes(bench.rows))) + "\n"
