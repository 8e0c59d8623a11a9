"""Tables and figures of the online benchmarks."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from undrift_bench.bench.harness import figure, published
from undrift_bench.bench.harness.cell import Cell, MethodRow, seeds_of
from undrift_bench.bench.harness.networks import SourceNetwork
from undrift_bench.bench.harness.notes import row_lines
from undrift_bench.bench.harness.request import Request
from undrift_bench.bench.harness.run import about
from undrift_bench.bench.harness.store import Record, Store
from undrift_bench.bench.harness.table import (
    AUGRC,
    AURC,
    FAILED,
    NOT_RUN,
    Column,
    field,
    footnotes,
    in_use,
    marked,
    median,
    several_sources,
    size,
    spread,
)
from undrift_bench.bench.harness.table import markdown as table
from undrift_bench.bench.harness.timed import how_timed
from undrift_bench.bench.online.settings import StreamSetting

if TYPE_CHECKING:
    from undrift_bench.bench.online.benchmark import OnlineBenchmark

COLUMNS = (
    field("error %", "error", 100),
    field("NLL", "nll", digits=3),
    field("ECE %", "ece", 100, 1),
    AURC,
    AUGRC,
    field("clean error after %", "source_error_after", 100),
    median("ms a batch", "milliseconds"),
    median("peak MiB", "peak_mib", 0),
    median("learnables", "learnables", 0),
    Column("file", lambda record: record.get("file_bytes"), size),
)

HOW = (
    "Mean ± standard deviation over seeds; error, NLL and ECE are means over corruptions. Seed 0 takes the images in "
    "their files' order, other seeds permute them within each corruption; the seed is also that of the method's own "
    "randomness. Time is the median of single batches, memory the peak without the images. Clean error after: of the "
    "network as the stream left it, on clean test images, asked as it answered the stream (the mean network, or draws; "
    "over the same views)."
)


class StreamTable:
    """One table: a network in a setting, a line a row."""

    def __init__(
        self, bench: "OnlineBenchmark", store: Store, request: Request, network: SourceNetwork, setting: StreamSetting
    ) -> None:
        self.bench, self.store, self.request, self.network, self.setting = bench, store, request, network, setting

    @property
    def rows(self) -> list[MethodRow]:
        """The benchmark's lines, and those of its ablation that were run."""
        return [*self.bench.rows, *(row for row in self.bench.ablation if self.records(row))]

    def cells(self, row: MethodRow) -> list[Cell]:
        """Return the cells of a line, one per seed."""
        images = self.bench.count(self.setting, self.request)
        place = (self.bench.name, self.network.name, self.setting.name, row)
        return [Cell(*place, seed, images, self.request.precision) for seed in seeds_of(row, self.request.seeds)]

    def records(self, row: MethodRow) -> list[Record]:
        """Return what is finished of a line."""
        return self.store.all(self.cells(row))

    def all(self) -> list[Record]:
        """Return what is finished of the table."""
        return [record for row in self.rows for record in self.records(row)]

    def failures(self) -> dict[str, str]:
        """Return the messages of lines of which nothing is finished and something failed."""
        found: dict[str, str] = {}
        for row in self.rows:
            if not self.records(row):
                messages = [r["failed"] for c in self.cells(row) if (r := self.store.get(c)) and "failed" in r]
                found |= {row.name: messages[0]} if messages else {}
        return found

    def said(self, row: MethodRow) -> tuple[published.Published, ...]:
        """Return what was published of a line: continual streams of methods as their authors run them."""
        if row.control or not self.network.published or self.setting.name != "continual":
            return ()
        return published.online(self.bench.name, row.name)


def markdown(bench: "OnlineBenchmark", store: Store, request: Request) -> str:
    """Return all tables: each network in its settings, and by corruption."""
    text = [f"# {bench.title}\n"]
    for network in bench.networks:
        parts = [StreamTable(bench, store, request, network, setting) for setting in bench.settings]
        main, others = parts[0], [part for part in parts[1:] if part.all() or part.failures()]
        text += _part(main)
        if others:
            text.append(f"## {network.title}: error % by setting\n")
            text.append(_by_setting([main, *others]))
            for part in others:
                text += _part(part)
    text.append(_notes(bench))
    return "\n".join(text)


def figures(bench: "OnlineBenchmark", store: Store, request: Request) -> dict[str, Callable[[Path], int]]:
    """Return what draws each figure for which there are numbers."""
    drawn: dict[str, Callable[[Path], int]] = {}
    for network in bench.networks:
        sizes: dict[str, dict[float, float]] = {}
        for setting in bench.settings:
            part = StreamTable(bench, store, request, network, setting)
            marks = [_mark(part, row) for row in part.rows if part.records(row)]
            if not marks:
                continue
            if setting.of_sizes and setting.batch is not None:
                for mark in marks:
                    sizes.setdefault(mark.name, {})[setting.batch] = mark.mean
                continue
            title = figure.finding(marks, f"{bench.title}, {network.title}: {setting.title}")
            ending = f"-{network.name}-{setting.name}"
            drawn[ending] = partial(figure.overview, title=title, marks=marks)
        sizes = {name: points for name, points in sizes.items() if len(points) > 1}  # one alone is in the tables
        if sizes:
            title = f"{bench.title}, {network.title}: error against the size of a batch"
            axes = ("images per batch", "error %")
            drawn[f"-{network.name}-batch"] = partial(figure.lines, title=title, curves=sizes, axes=axes)
    return drawn


def _part(part: StreamTable) -> list[str]:
    columns = in_use(COLUMNS, part.all())
    header = ["method", "published %", *(column.title for column in columns), "seeds"]
    failures = part.failures()
    rows: list[list[str]] = []
    for row in part.rows:
        records, said = part.records(row), part.said(row)
        mark = str(said[0]) if said else "–"
        if records:
            cells = [column.text(records) for column in columns] + [str(len(records))]
        else:
            cells = [FAILED if row.name in failures else NOT_RUN] + [""] * len(columns)
        rows.append([marked(_name(row), records), mark, *cells])
    header[1], header[2] = header[2], header[1]  # our number first, the published one beside it
    for row_cells in rows:
        row_cells[1], row_cells[2] = row_cells[2], row_cells[1]
    text = [f"## {part.network.title}: {part.setting.title}\n", about(part.all()) + "\n", table(header, rows)]
    text += [f"- {name} failed: {message}" for name, message in failures.items()]
    by_row = {row.label: part.records(row) for row in part.rows}
    text += [f"- {row.label}: {row.why}; {_settings(row)}." for row in part.rows if row.group]
    text += resets(by_row) + footnotes(by_row) + several_sources(by_row, a_seed=False) + how_timed(by_row)
    if part.all():
        text += ["\nError % by corruption, published values in brackets:\n", _by_corruption(part)]
        text += ["Error % by cycle:\n", by_cycle(part)] if part.setting.cycles > 1 else []
    return text


def by_cycle(part: StreamTable) -> str:
    """Return the error of each row in some cycles, and how much the last one's differs from the first's."""
    last = part.setting.cycles - 1
    shown = sorted({0, 1, last // 4, last // 2, 3 * last // 4, last})
    lines = []
    for row in part.rows:
        if records := [record for record in part.records(row) if "cycles" in record]:
            found = [spread([record["cycles"][cycle] for record in records], 100) for cycle in shown]
            change = spread([record["cycles"][last] - record["cycles"][0] for record in records], 100)
            lines.append([_name(row), *found, change])
    return table(["method", *(f"cycle {cycle + 1}" for cycle in shown), "last − first"], lines)


def resets(records: Mapping[str, Sequence[Record]]) -> list[str]:
    """Return a line for each row that was put back to the source: after how many of its steps, over all seeds.

    Records of up to 16 November 2026 do not know, and are left out.

    Args:
        records: of each row, by the name that the table calls it.

    Examples:
        >>> resets({"sar": [{"steps": 75, "resets": 60}, {"steps": 25, "resets": 20}], "tent": [{"error": 0.2}]})
        ['- sar was put back to the source after 80 of 100 steps.']
    """
    known = {name: [r for r in found if "resets" in r] for name, found in records.items()}
    return [
        f"- {name} was put back to the source after {count:,} of {sum(r['steps'] for r in found):,} steps."
        for name, found in known.items()
        if (count := sum(r["resets"] for r in found))
    ]


def _by_corruption(part: StreamTable) -> str:
    corruptions = part.bench.corruptions
    rows = []
    for row in part.rows:
        records = part.records(row)
        if records:
            said = next((p.domains for p in part.said(row) if len(p.domains) == len(corruptions)), ())
            cells = [
                f"{_of_domain(records, name):.1f}" + (f" ({said[place]:.1f})" if said else "")
                for place, name in enumerate(corruptions)
            ]
            rows.append([_name(row), *cells])
    return table(["method", *(name.replace("_", " ") for name in corruptions)], rows)


def _by_setting(parts: Sequence[StreamTable]) -> str:
    rows = []
    for row in parts[0].rows:
        found = [[100 * record["error"] for record in part.records(row)] for part in parts]
        rows.append([_name(row), *(spread(numbers) if numbers else NOT_RUN for numbers in found)])
    return table(["method", *(part.setting.name for part in parts)], rows)


def _notes(bench: "OnlineBenchmark") -> str:
    sources: dict[str, list[str]] = {}
    for row in bench.rows:
        for place, said in enumerate(() if row.control else published.online(bench.name, row.name)):
            also = f" (also {said})" if place else ""
            sources.setdefault(said.source, []).append(f"{row.name}{also}")
    lines = [
        HOW,
        *(f"{row.label}: a control; {row.why} It runs with {_settings(row)}." for row in bench.rows if row.control),
        *row_lines(bench.rows),
        *(f"Published by {source}: {', '.join(names)}." for source, names in sources.items()),
        *([bench.note] if bench.note else []),
    ]
    return "\n".join(f"- {line}" for line in lines) + "\n"


def _settings(row: MethodRow) -> str:
    return f"`{row.method}`, " + ", ".join(f"{name} {value}" for name, value in row.settings.items())


def _name(row: MethodRow) -> str:
    return f"*{row.label}*" if row.control else row.label


def _of_domain(records: Sequence[Record], name: str) -> float:
    return 100 * statistics.fmean(record["domains"][name]["error"] for record in records)


def _mark(part: StreamTable, row: MethodRow) -> figure.BarMark:
    records, said = part.records(row), part.said(row)
    domains = {name: _of_domain(records, name) for name in part.bench.corruptions}
    errors = [100 * record["error"] for record in records]
    return figure.BarMark(row.label, errors, said[0].value if said else None, row.control, domains)
