"""Run missing cells, keep finished ones, write the tables; the same for every benchmark."""

import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from undrift._errors import OptionError, UndriftWarning
from undrift.system.atomic import write_text
from undrift.system.progress import Bar
from undrift_bench.bench.harness.cell import Cell, in_order
from undrift_bench.bench.harness.measure import machine
from undrift_bench.bench.harness.request import CannotRun, Request, TooLate
from undrift_bench.bench.harness.store import Record, Store

Say = Callable[[str], None]
RunCell = Callable[[Cell, Bar], Mapping[str, Any]]
MARGIN = 1.1  # so that a short guess does not overrun the machine's time
LEFT = ("not run", "stale")
MOST_WARNINGS = 5  # per cell, as a method may warn at every batch with another number


@runtime_checkable
class Benchmark(Protocol):
    """What a benchmark provides; `run` does the rest."""

    @property
    def name(self) -> str:
        """Its name on the command line and in file names."""

    def cells(self, request: Request) -> list[Cell]:
        """Return the cells that were asked for, in the order of the table."""

    def shown(self, request: Request) -> list[Cell]:
        """Return the cells of the tables: those asked for, and whatever else may be finished."""

    def prepare(self, request: Request) -> RunCell:
        """Return what runs one cell; data and networks are loaded when first used, outside the timed part."""

    def markdown(self, store: Store, request: Request) -> str:
        """Return the tables; a cell without a record is "not run"."""

    def figures(self, store: Store, request: Request) -> dict[str, Callable[[Path], int]]:
        """Return what draws each figure, by the end of its file's name ("" for the main one)."""


@runtime_checkable
class Knowing(Protocol):
    """What runs cells and may have the numbers of one already, from another that is the same run."""

    def known(self, cell: Cell) -> bool:
        """Return whether nothing will be run for a cell, so that no deadline need hold it back."""


@runtime_checkable
class Tabled(Protocol):
    """A benchmark that reads another one's cells, and so can write its tables without running any."""

    @property
    def cells_of(self) -> Benchmark:
        """The benchmark whose cells it reads."""

    def tables(self, request: Request) -> "Outcome":
        """Write its pages from the cells that are there."""


@dataclass
class Outcome:
    """What one call did: how many cells ran, failed, were there already or are left, the files it wrote and lacked."""

    ran: int = 0
    failed: int = 0
    kept: int = 0
    left: int = 0
    wrote: list[Path] = field(default_factory=list)
    lacking: list[CannotRun] = field(default_factory=list)
    text: str = ""

    @property
    def trouble(self) -> str:
        """Why the call did not do what was asked, in three facts; nothing where it did, or a deadline left the rest."""
        if self.failed:
            return (
                f"{self.failed} failed, with the messages above; needed: none that does. Mend what they say, and give "
                "the same command again: what is finished stays."
            )
        files = [reason for reason in self.lacking if not isinstance(reason, TooLate)]
        return "" if self.ran or self.kept or not files else f"nothing could be run: {files[0]}"


def run(benchmark: Benchmark, request: Request, say: Say = print, quiet: bool = False) -> Outcome:
    """Run the cells that are not finished, in their order, until the deadline; then write JSON, Markdown and figures.

    An error in one cell is recorded and does not stop the rest; the next call tries that cell again. After Ctrl-C, a
    kill or the deadline the same call continues. Several processes may run at once; each cell is run by one of them.
    """
    started = time.monotonic()
    store = Store(request.results / benchmark.name)
    cells = in_order(benchmark.cells(request))
    pending = [cell for cell in cells if store.finished(cell) is None]
    outcome = Outcome(kept=len(cells) - len(pending))
    run_cell = benchmark.prepare(request)
    anything: object = run_cell
    knowing = anything if isinstance(anything, Knowing) else None
    with Bar(benchmark.name, len(cells), False if quiet else None, outcome.kept) as bar:
        for number, cell in enumerate(pending, 1):
            left = None if request.deadline is None else request.deadline - (time.monotonic() - started)
            guess = guessed_seconds(cell, cells, store)
            if left is not None and left < MARGIN * guess and not (knowing is not None and knowing.known(cell)):
                say(f"{left:.0f} s are left and {cell.key} takes about {guess:.0f} s: not started")
                continue
            with store.claim(cell) as mine:
                if not mine:
                    bar.advance(1)
                    say(f"{cell.key}: another process runs it, or has just finished it")
                    continue
                bar.say(f"{benchmark.name} {outcome.kept + number}/{len(cells)} {cell.key}")
                _one(cell, run_cell, store, request, outcome, bar, say)
    store = Store(store.folder)  # read again, as other processes may have finished it
    outcome.left = sum(store.state(cell) in LEFT for cell in cells)
    write(benchmark, store, request, outcome)
    return outcome


def tables(benchmark: Benchmark, request: Request) -> Outcome:
    """Write JSON, Markdown and figures from the cells that are there, and run none; needs neither data nor networks."""
    store = Store(request.results / benchmark.name)
    states = [store.state(cell) for cell in benchmark.cells(in_its_precision(benchmark, store, request))]
    outcome = Outcome(kept=states.count("finished"), left=sum(states.count(state) for state in LEFT))
    write(benchmark, store, request, outcome)
    return outcome


def with_cells(found: object) -> Benchmark | None:
    """Return the benchmark whose cells are run, listed and shown: the one found, or the one whose cells it reads."""
    found = found.cells_of if isinstance(found, Tabled) else found
    return found if isinstance(found, Benchmark) else None


def check_selection(benchmark: Benchmark, request: Request) -> None:
    """Raise if a selection has no cell."""
    if not benchmark.cells(request):
        chosen = {"only": request.only, "tier": request.tier or "", "settings": request.settings}
        given = " ".join(f"--{name} {','.join(value)}" for name, value in chosen.items() if value)
        raise OptionError(
            f"no cell of {benchmark.name} is left by {given}; needed: one at least. Leave one of these out; --list "
            "says which cells there are."
        )


def listing(benchmark: Benchmark, request: Request) -> list[tuple[str, str]]:
    """Return the cells asked for in the order in which they would run, each with its state."""
    store = Store(request.results / benchmark.name)
    return [(cell.key, store.state(cell)) for cell in in_order(benchmark.cells(request))]


def in_other_precision(benchmark: Benchmark, request: Request) -> tuple[str, int]:
    """Return the precision that was not asked for, and how many of the cells asked for are finished in it."""
    store, other = Store(request.results / benchmark.name), replace(request, fast=not request.fast)
    keys = {cell.key for cell in benchmark.cells(request)}  # a benchmark need not tell precisions apart
    there = [cell for cell in benchmark.cells(other) if cell.key not in keys]
    return other.precision, sum(store.finished(cell) is not None for cell in there)


def guessed_seconds(cell: Cell, cells: Sequence[Cell], store: Store) -> float:
    """Return how long a cell will take: as long as with another seed, or by its row's cost; 0 where nothing is known.

    The guess uses finished cells of the same network and setting, or else of the whole benchmark.
    """
    known = [(c, r) for c in cells if (r := store.finished(c)) is not None and "seconds" in r]
    twins = [r["seconds"] for c, r in known if (c.network, c.setting, c.row, c.images) == _but_seed(cell)]
    if twins:
        return max(twins)
    near = [(c, r) for c, r in known if (c.network, c.setting) == (cell.network, cell.setting)] or known
    rates = [r["seconds"] / (c.row.cost * c.images) for c, r in near]
    return statistics.median(rates) * cell.row.cost * cell.images if rates else 0.0


def row_notes(benchmark: Benchmark, request: Request) -> dict[str, str]:
    """Return what a reader has to know of the rows asked for, by their names."""
    return {cell.row.name: cell.row.note for cell in benchmark.cells(request) if cell.row.note}


def _but_seed(cell: Cell) -> tuple[Any, ...]:
    return cell.network, cell.setting, cell.row, cell.images


def _one(cell: Cell, run_cell: RunCell, store: Store, request: Request, outcome: Outcome, bar: Bar, say: Say) -> None:
    """Run one cell and keep what came of it."""
    about = machine(request.place) | {"fast": request.fast}
    begun = time.monotonic()
    heard: list[str] = []
    try:
        with hearing(heard):
            numbers = dict(run_cell(cell, bar))
    except CannotRun as reason:
        if str(reason) not in map(str, outcome.lacking):  # once: it is the same for many cells
            say(f"{cell.key}: not run: {reason}")
        outcome.lacking.append(reason)
        return
    except Exception as error:  # any error: one method's bug must not cost the others their numbers
        message = f"{type(error).__name__}: {error}"
        store.put(cell, about | {"failed": message, "warnings": heard})
        outcome.failed += 1
        say(f"{cell.key}: failed: {message}")
        return
    finally:
        bar.advance(1)
    store.put(cell, {**about, "seconds": time.monotonic() - begun, **numbers, "warnings": heard})
    outcome.ran += 1
    headline = numbers.get("error", numbers.get("accuracy"))
    text = "" if headline is None else f"{'error' if 'error' in numbers else 'accuracy'} {100 * headline:.2f} %, "
    say(f"{cell.key}: {text}{time.monotonic() - begun:.1f} s")


@contextmanager
def hearing(heard: list[str]) -> Iterator[None]:
    """Take down what undrift warns of, each message once, instead of printing it; other warnings go their way."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UndriftWarning)
        try:
            yield
        finally:
            ours = [w for w in caught if issubclass(w.category, UndriftWarning)]
            messages = list(dict.fromkeys(str(w.message) for w in ours))
            heard += messages[:MOST_WARNINGS]
            if len(messages) > MOST_WARNINGS:
                heard.append(f"and {len(messages) - MOST_WARNINGS} more warnings")
    for other in caught:
        if other not in ours:
            warnings.warn_explicit(other.message, other.category, other.filename, other.lineno)


def in_its_precision(benchmark: Benchmark, store: Store, request: Request) -> Request:
    """Return the request whose precision there is anything in to show: the one asked for, or else the other.

    So tables of bfloat16 cells are written without `--fast` too, and no table mixes the two.
    """
    other = replace(request, fast=not request.fast)
    mine = any(store.shown(cell) for cell in benchmark.shown(request))
    return request if mine or not any(store.shown(cell) for cell in benchmark.shown(other)) else other


def write(benchmark: Benchmark, store: Store, request: Request, outcome: Outcome) -> None:
    """Write JSON, Markdown and figures of what is finished, and note their names in the outcome.

    A request selects what is run but never makes a page smaller. Tables have every seed; those of another view
    (`Request.view`), and those in float32 beside cells in bf16, have their own names; and a page with cells stays if
    nothing is finished.
    """
    request = replace(request, seeds=max(request.seeds, Request.seeds))
    request = in_its_precision(benchmark, store, request)
    shown = benchmark.shown(request)
    keys = {cell.key for cell in shown}
    aside = [cell for cell in benchmark.shown(replace(request, fast=not request.fast)) if cell.key not in keys]
    outcome.text = benchmark.markdown(store, request)
    if left_out := len(store.all(aside)):
        outcome.text += f"- {left_out} finished cells in {aside[0].precision} are not in these tables; "
        outcome.text += f"{'leave --fast out' if request.fast else '--fast'} to see them.\n"
    name = benchmark.name + request.view + ("-float32" if left_out and not request.fast else "")
    place = request.results / name
    content = {"benchmark": benchmark.name, "cells": store.all(shown)}
    outcome.wrote = []
    if not content["cells"] and _has_cells(place.with_suffix(".json")):
        return
    request.results.mkdir(parents=True, exist_ok=True)
    write_text(place.with_suffix(".json"), json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    write_text(place.with_suffix(".md"), outcome.text)
    outcome.wrote = [place.with_suffix(".json"), place.with_suffix(".md")]
    for ending, draw in benchmark.figures(store, request).items():
        path = request.results / f"{name}{ending}.png"
        draw(path)
        outcome.wrote.append(path)


def _has_cells(page: Path) -> bool:
    """Return whether a page that was written earlier has numbers."""
    try:
        return bool(json.loads(page.read_text(encoding="utf-8"))["cells"])
    except (OSError, ValueError, KeyError, TypeError):  # none, or nothing that a page could lose
        return False


def about(records: Sequence[Record]) -> str:
    """Return one line that says of a table's records how they came about: machine, date, precision, seeds, images."""
    if not records:
        return "Nothing was run yet."

    def all_of(name: str) -> list[Any]:
        return sorted({record[name] for record in records if name in record})

    dates, fast = all_of("date"), all_of("fast")
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    precision = " and ".join("channels-last bfloat16" if f else "float32" for f in fast)
    seeds = ", ".join(map(str, all_of("seed")))
    images = " or ".join(f"{n:,}" for n in all_of("images"))
    return (
        f"{' and '.join(all_of('hardware'))}; torch {' and '.join(all_of('torch'))}; {precision}; {when}; "
        f"seeds {seeds}; {images} images of each domain."
    )
