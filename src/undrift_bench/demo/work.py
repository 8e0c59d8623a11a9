"""Run all rows in several processes, as small tensors do best with one core each."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

from undrift_bench.demo.domain_file import Filed, domain_file
from undrift_bench.demo.rows import OURS, ROWS, DemoRow, Scored, run
from undrift_bench.demo.setting import DemoSetting, World, load_world
from undrift_bench.demo.streams import Streamed, run_stream

MOST_WORKERS = 4
_here: list[tuple[World, DemoSetting]] = []
"""What a worker works on, loaded when it begins."""

Done = Scored | Streamed | Filed


@dataclass(frozen=True)
class Job:
    """One run of a row with a seed.

    Attributes:
        online: whether it is the stream's.
        place: of the row.
    """

    online: bool
    place: int
    seed: int

    @property
    def row(self) -> DemoRow:
        """The row that is run."""
        return ROWS[self.place]

    @property
    def files(self) -> bool:
        """Whether it is the run that the pack is written from."""
        return not self.online and self.row is OURS and self.seed == 0


def jobs(setting: DemoSetting) -> list[Job]:
    """Return every run, the long ones first, so that no core waits at the end for another."""
    return [
        Job(online, place, seed)
        for online in (False, True)
        for place in reversed(range(len(ROWS)))
        for seed in range(setting.seeds)
        if not online or ROWS[place].stream is not None
    ]


def do_all(setting: DemoSetting, out: Path, workers: int) -> Iterator[tuple[Job, Done]]:
    """Yield each run with its scores as it ends; the default's first seed comes with the pack.

    With one worker everything happens in this process. Ctrl-C ends workers at once: only packs are written by one,
    whole or not at all.
    """
    todo = jobs(setting)
    if workers == 1:
        world = load_world(setting)
        for job in todo:
            yield job, _do(job, world, setting, out)
        return
    # Fresh processes: a fork of one whose threads have worked may hang.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _begin, (setting,))
    try:
        for done in as_completed([pool.submit(_work, job, out) for job in todo]):
            yield done.result()
    finally:
        pool.shutdown(cancel_futures=True)


def usual_workers() -> int:
    """Return how many processes this machine has cores for, four at most."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_WORKERS)


def _begin(setting: DemoSetting) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # without a traceback; the first process says what happened
    _here.append((load_world(setting), setting))


def _work(job: Job, out: Path) -> tuple[Job, Done]:
    return job, _do(job, *_here[0], out)


def _do(job: Job, world: World, setting: DemoSetting, out: Path) -> Done:
    if job.files:
        return domain_file(world, setting, out)
    return (run_stream if job.online else run)(job.row, world, setting, job.seed)
