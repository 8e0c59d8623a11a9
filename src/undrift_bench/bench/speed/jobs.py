"""Measure in separate processes: no shared memory or compiled code, and one failure stops no other."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import IO, Any

import torch

from undrift_bench.bench.harness.run import Say
from undrift_bench.bench.speed.modes import how

Job = dict[str, Any]
Row = dict[str, Any]
ALL_AT_ONCE = 96 * 2**30  # bytes that a GPU needs to hold every step at the same time


def measured(jobs: list[Job], device: torch.device, say: Say) -> Iterator[Row]:
    """Give what each job found; all get ready together where memory allows, else a network's at a time."""
    groups = [jobs]
    if device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory < ALL_AT_ONCE:
        names = dict.fromkeys(job["case"]["network"] for job in jobs)
        groups = [[job for job in jobs if job["case"]["network"] == name] for name in names]
    for group in groups:
        yield from _together(group, device, say)


class Incomplete(Exception):
    """A part was not measured to its end."""


def streamed(job: Job, device: torch.device, say: Say) -> Iterator[Row]:
    """Give the rows of one process, as it finds them; what it could not measure is said, and left out.

    Raises:
        Incomplete: the process ended before it was through.
    """
    with ExitStack() as stack:
        process, errors = _start(stack, job, device)
        assert process.stdout is not None
        for line in process.stdout:
            if row := _row(line):
                say(str(row))
                if "error" not in row:
                    yield row
        if process.wait():
            raise Incomplete(_last(errors))


def _together(jobs: list[Job], device: torch.device, say: Say) -> Iterator[Row]:
    """Give what each job found, alone on the machine; one that failed says why, and the others go on."""
    with ExitStack() as stack:
        started = [_start(stack, job, device) for job in jobs]
        for process, _ in started:
            _ready(process)
        if device.type == "cuda":
            say(f"{len(jobs)} networks are built; cuDNN tries its algorithms, for one after the other")
        for process, _ in started:
            _go(process)
            _ready(process)
        say("all get ready at once: compiling takes a minute or two")
        for process, _ in started:
            _go(process)
        for process, _ in started:
            _ready(process)
        for job, (process, errors) in zip(jobs, started, strict=True):
            out, _ = process.communicate("go\n")
            rows = [row for line in out.splitlines() if (row := _row(line))]
            found = rows[-1] if rows else {"error": _last(errors)}
            say(f"{job['case']['network']} {job['kind']} {how(job)}: {found}")
            yield {**job, **found}


def _start(stack: ExitStack, job: Job, device: torch.device) -> tuple["subprocess.Popen[str]", IO[str]]:
    """Return a process and the file of what it warns of: a full pipe would stop one that nobody reads yet."""
    command = [sys.executable, "-m", "undrift_bench.bench.speed.measure", str(device), json.dumps(job)]
    errors = stack.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
    process = stack.enter_context(subprocess.Popen(command, text=True, **pipes))  # noqa: S603
    stack.callback(process.kill)  # where this one is interrupted; nothing to one that has ended
    return process, errors


def _ready(process: "subprocess.Popen[str]") -> None:
    assert process.stdout is not None
    any(line == "ready\n" for line in process.stdout)  # or the end, where it failed


def _go(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it failed, and will be asked why at its turn
        os.write(process.stdin.fileno(), b"go\n")  # past the buffer, which would be written again when it is closed


def _row(line: str) -> Row | None:
    return dict(json.loads(line)) if line.startswith("{") else None


def _last(errors: IO[str]) -> str:
    errors.seek(0)
    return (errors.read().strip().splitlines() or ["no answer"])[-1]
