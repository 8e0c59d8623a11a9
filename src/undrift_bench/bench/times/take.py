"""Measure the time per batch of finished cells afterwards, alone on the machine.

    undrift bench online-c10 --data FOLDER --wrn2810 FILE --fast --times

Each row of a table needs one time: its first finished seed gets it, with a record of how it was taken.
"""

import time
from collections.abc import Hashable, Iterable

from undrift._errors import OptionError
from undrift.system.progress import Bar
from undrift_bench.bench.harness.cell import Cell
from undrift_bench.bench.harness.measure import machine
from undrift_bench.bench.harness.request import CannotRun, Request
from undrift_bench.bench.harness.run import MARGIN, Benchmark, Outcome, Say, hearing, in_its_precision, write
from undrift_bench.bench.harness.store import Record, Store
from undrift_bench.bench.offline.run import Adapting
from undrift_bench.bench.online.streaming import Streaming
from undrift_bench.bench.times.timers import StepTimer, StreamTimer, Taken, Timer


def take_times(benchmark: Benchmark, request: Request, say: Say = print, quiet: bool = False) -> Outcome:
    """Time the lines asked for that have a finished cell and no time of this hardware; then write the tables.

    Each time is written at once: after Ctrl-C the same call goes on where it stopped. A line that breaks is named, and
    its cell stays as it is.
    """
    if "shared" in request.extra:
        raise OptionError("--set shared=… says that the machine has other work; times need it alone. Leave one out.")
    started, longest = time.monotonic(), 0.0
    store = Store(request.results / benchmark.name)
    request = in_its_precision(benchmark, store, request)
    timer = timer_of(benchmark, request)
    hardware = machine(request.place)["hardware"]
    firsts = [first_finished(cells, store) for cells in lines(benchmark.cells(request), timer)]
    found = [cell for cell in firsts if cell is not None]
    wanted = [cell for cell in found if not _has_time(store.finished(cell), hardware)]
    outcome = Outcome(kept=len(found) - len(wanted))
    with Bar(f"{benchmark.name} times", len(wanted), False if quiet else None) as bar:
        for cell in wanted:
            begun = time.monotonic()
            if request.deadline is not None and request.deadline - (begun - started) < MARGIN * longest:
                break
            bar.say(f"{benchmark.name} times {cell.key}")
            _one(cell, timer, store, request, outcome, say)
            bar.advance(1)
            longest = max(longest, time.monotonic() - begun)
    outcome.left = len(firsts) - outcome.kept - outcome.ran - outcome.failed
    write(benchmark, store, request, outcome)
    return outcome


def timer_of(benchmark: Benchmark, request: Request) -> Timer:
    """Return what times a benchmark's cells."""
    runs = benchmark.prepare(request)
    if isinstance(runs, Streaming):
        return StreamTimer(runs)
    if isinstance(runs, Adapting):
        return StepTimer(runs)
    raise OptionError(
        f"{benchmark.name} is neither a benchmark of streams nor offline; times are taken of these. Leave --times out."
    )


def lines(cells: Iterable[Cell], timer: Timer) -> list[list[Cell]]:
    """Return the cells of each line of the tables, in their order."""
    found: dict[Hashable, list[Cell]] = {}
    for cell in cells:
        found.setdefault(timer.line(cell), []).append(cell)
    return list(found.values())


def first_finished(cells: Iterable[Cell], store: Store) -> Cell | None:
    """Return the first finished cell of a line; with its seeds in order, that is the lowest of its first task."""
    return next((cell for cell in cells if store.finished(cell) is not None), None)


def _has_time(record: Record | None, hardware: str) -> bool:
    """Return whether nothing is lacking: a time of the cell's own run, or one that was taken here."""
    if record is None or record.get("milliseconds") is None:
        return False
    return bool(record.get("timed", {}).get("hardware", hardware) == hardware)


def _one(cell: Cell, timer: Timer, store: Store, request: Request, outcome: Outcome, say: Say) -> None:
    """Time one cell and add that to its record."""
    try:
        with hearing([]):  # what it warns of is in its record
            taken = timer(cell)
    except CannotRun as reason:
        if str(reason) not in map(str, outcome.lacking):  # once: it is the same for many lines
            say(f"{cell.key}: not timed: {reason}")
        outcome.lacking.append(reason)
        return
    except Exception as error:  # of any kind: the other lines have times, too
        outcome.failed += 1
        say(f"{cell.key}: not timed: {type(error).__name__}: {error}")
        return
    if taken.milliseconds is None:
        say(f"{cell.key}: not timed: it has too few batches")
        return
    record = store.finished(cell)
    assert record is not None, "finished cells alone are timed"
    store.put(cell, record | {"milliseconds": taken.milliseconds, "timed": _how(taken, request)})
    outcome.ran += 1
    say(f"{cell.key}: {taken.milliseconds:.2f} ms a batch")


def _how(taken: Taken, request: Request) -> dict[str, object]:
    note = {"note": taken.note} if taken.note else {}
    return {"batches": taken.batches, **machine(request.place), **note}
