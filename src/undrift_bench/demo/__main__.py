"""The demo from the command line: `python -m undrift_bench.demo --out out/demo`."""

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from undrift._errors import DataError, UndriftError
from undrift.system.progress import Bar
from undrift_bench.demo.domain_file import EXACT, NAME, Filed
from undrift_bench.demo.picture import draw
from undrift_bench.demo.results import Results
from undrift_bench.demo.rows import Scored
from undrift_bench.demo.setting import QUICK, DemoSetting
from undrift_bench.demo.show import show_beginning, show_results
from undrift_bench.demo.streams import Streamed
from undrift_bench.demo.work import Done, Job, do_all, jobs, usual_workers

WIDTH = 120
"""Of the table where no terminal says how wide it is."""


def demo(out: Path, setting: DemoSetting, workers: int, console: Console) -> Results:
    """Run everything, print it, and write demo.json, demo.png and the packs into `out`."""
    start = time.perf_counter()
    _make(out)
    show_beginning(console, setting)
    done: dict[Job, Done] = {}
    with Bar("demo", len(jobs(setting))) as bar:
        for job, scores in do_all(setting, out, workers):
            done[job] = scores
            bar.advance(done=f"{job.row.name}, seed {job.seed}")
    results = collect(setting, done, time.perf_counter() - start)
    draw(results, out / "demo.png")
    results = replace(results, seconds=time.perf_counter() - start)
    results.save(out / "demo.json")
    show_results(console, results)
    written = ", ".join(f"{out / name}" for name in ("demo.json", "demo.png", NAME, EXACT))
    console.print(f"\n{results.seconds:.0f} s with {workers} processes. Written: {written}", highlight=False)
    return results


def collect(setting: DemoSetting, done: dict[Job, Done], seconds: float) -> Results:
    """Return the runs by row and seed."""
    (file,) = (found for found in done.values() if isinstance(found, Filed))
    table: dict[str, list[Scored]] = {}
    streams: dict[str, list[Streamed]] = {}
    for job in sorted(done, key=lambda job: (job.place, job.seed)):
        scores = done[job]
        if isinstance(scores, Streamed):
            streams.setdefault(job.row.name, []).append(scores)
        else:
            table.setdefault(job.row.name, []).append(scores.scored if isinstance(scores, Filed) else scores)
    return Results(setting, table, streams, file, seconds)


def main(arguments: list[str] | None = None) -> int:
    """Run the demo and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="undrift_bench.demo", description="Adapt from MNIST's digits to scans, by default and by rivals."
    )
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder for results (default: out/demo)")
    parser.add_argument("--quick", action="store_true", help="seconds, on few images, in one process: for a test")
    parser.add_argument("--seeds", type=int, default=None, help="runs of each row, two at least")
    parser.add_argument("--workers", type=int, default=None, help="processes (default: one per core, four at most)")
    given = parser.parse_args(arguments)
    setting = QUICK if given.quick else DemoSetting()
    if given.seeds is not None:
        if given.seeds < 2:
            parser.error(f"--seeds {given.seeds}: two at least, as one seed has no deviation")
        setting = replace(setting, seeds=given.seeds)
    workers = given.workers or (1 if given.quick else usual_workers())
    torch.set_num_threads(1)  # tensors here are small: a second thread only waits
    terminal = Console()
    try:
        demo(given.out, setting, workers, terminal if terminal.is_terminal else Console(width=WIDTH))
    except UndriftError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; demo.json and demo.png were not written", file=sys.stderr)
        return 130
    return 0


def _make(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"the folder {out} cannot be made ({error.strerror or error}); needed: a folder to write the results into. "
            "Choose another with --out."
        ) from error


if __name__ == "__main__":
    sys.exit(main())
