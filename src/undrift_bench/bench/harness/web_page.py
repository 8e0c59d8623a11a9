"""An HTML page of a benchmark: one card per network and setting, with the error of each row."""

import statistics
from pathlib import Path

from undrift.judge.page.charts import rows_of_bars
from undrift.judge.page.document import Card, Headline, render, write
from undrift.judge.page.markup import percent
from undrift_bench.bench.harness.request import Request
from undrift_bench.bench.harness.run import Benchmark, Outcome, in_its_precision
from undrift_bench.bench.harness.store import Store


def write_page(path: Path, name: str, benchmark: Benchmark | None, request: Request, outcome: Outcome) -> int:
    """Write the page of a benchmark, whole or not at all, and return its size in bytes.

    Args:
        benchmark: whose finished cells are shown; None where it has no cells.
    """
    groups = {} if benchmark is None else errors(benchmark, request)
    cards = [_card(place, rows) for place, rows in groups.items()]
    best = [(min(rows, key=lambda row: rows[row][0]), place) for place, rows in groups.items() if rows]
    if len(best) == 1:
        row, place = best[0]
        mean = groups[place][row][0]
        headline = Headline("plain", name, f"{row} errs least: {percent(mean)}.", "", percent(mean), f"Error, {place}")
    elif best:
        winners = sorted({row for row, _ in best}, key=lambda row: -sum(row == other for other, _ in best))
        times = sum(row == winners[0] for row, _ in best)
        headline = Headline("plain", name, f"{winners[0]} errs least in {times} of {len(best)} settings.")
    else:
        headline = Headline("plain", name, "Nothing of this benchmark has an error to show yet.")
    facts = [(what, str(getattr(outcome, what))) for what in ("ran", "failed", "kept", "left")]
    return write(path, render("benchmark", headline, facts, cards, [("The tables", outcome.text)]))


def errors(benchmark: Benchmark, request: Request) -> dict[str, dict[str, tuple[float, int]]]:
    """Return mean error and number of seeds of each row with finished cells, by network and setting."""
    store = Store(request.results / benchmark.name)
    found: dict[str, dict[str, list[float]]] = {}
    for cell in benchmark.shown(in_its_precision(benchmark, store, request)):
        record = store.shown(cell)
        if record is not None and isinstance(error := record.get("error"), float):
            found.setdefault(f"{cell.network}, {cell.setting}", {}).setdefault(cell.row.label, []).append(error)
    return {
        place: {row: (statistics.fmean(values), len(values)) for row, values in rows.items()}
        for place, rows in found.items()
    }


def _card(place: str, rows: dict[str, tuple[float, int]]) -> Card:
    best = min(rows, key=lambda row: rows[row][0])
    bars = [
        (row, [("adapted" if row == best else "source", mean, f"{percent(mean)}{f', {n} seeds' if n > 1 else ''}")])
        for row, (mean, n) in rows.items()
    ]
    high = max(mean for mean, _ in rows.values())
    return Card(f"{place}: {best} errs least, {percent(rows[best][0])}", rows_of_bars(bars, high), wide=len(rows) > 12)
