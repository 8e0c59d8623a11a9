"""Worker processes that decode images: their number, and the error when one is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import wait
from typing import Any, TypeVar

from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from undrift._errors import DataError, OptionError
from undrift.system.private import forget_workers

Item = TypeVar("Item")
FEW = 256
"""Below this many images, starting worker processes costs more than they save."""
VARIABLE = "UNDRIFT_WORKERS"
LOSSES = ("DataLoader worker (pid", "Pin memory thread exited", "Too many open files")
"""How PyTorch's words for lost workers begin."""


def usual_workers(images: int) -> int:
    """Return the number of decoding processes: none for a few images, else UNDRIFT_WORKERS, or one per core.

    Raises:
        OptionError: the variable holds something else than a number from 0 up.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if text and not text.isdecimal():
        raise OptionError(
            f"the environment variable {VARIABLE} is {text!r}; needed: how many processes decode images, 0 for none. "
            "Correct it, or unset it for one per core."
        )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 0 if images < FEW else int(text) if text else cores


def items_of(loader: DataLoader[Item]) -> Iterator[Item]:
    """Yield a loader's batches; raise our own error if one of its workers is lost."""
    if loader.num_workers == 0:
        yield from loader
        return
    items = None
    try:
        items = iter(loader)
        _hear_when_waiting(items)
        yield from items
    except (RuntimeError, OSError, EOFError) as error:
        if not _is_loss(error):
            raise
        raise DataError(_lost(f"was lost {_how(items, error)}", loader.num_workers)) from error


def shared(images: Tensor) -> str:
    """Move a batch to shared memory; return what is wrong if it does not fit, else "".

    A queue would do it too, but in a thread whose errors are lost: the main process would wait for ever.
    """
    worker = get_worker_info()
    if worker is None:
        return ""
    try:
        images.share_memory_()
    except RuntimeError as error:  # "No space left on device"; PyTorch has no kind of its own for it
        return _lost(f"could not hand over a batch ({str(error).splitlines()[0]})", worker.num_workers)
    return ""


def _lost(what: str, workers: int) -> str:
    return (
        f"one of {workers} processes that decode images {what}; needed: memory for all of them, and room for their "
        f"batches in /dev/shm. Set the environment variable {VARIABLE} to a smaller number, or to 0 to decode without "
        "them; a container gets more room with --shm-size=1g."
    )


def _is_loss(error: Exception) -> bool:
    """Return whether an error says that a worker is gone; a worker's own errors keep their type.

    Where it was about to hand something over, its end is an OSError or EOFError.
    """
    text = str(error)
    return text.startswith(LOSSES) if isinstance(error, RuntimeError) else "in DataLoader worker" not in text


def _how(items: Any, error: Exception) -> str:
    """Return how workers ended: SIGKILL is the system's where memory runs out, SIGBUS is of a full /dev/shm."""
    workers = getattr(items, "_workers", ())
    gone = wait([worker.sentinel for worker in workers], timeout=1)
    for worker in workers:
        if worker.sentinel in gone:
            worker.join()  # its connections break a moment before it has an exit code
    names = sorted({signal.Signals(-worker.exitcode).name for worker in workers if (worker.exitcode or 0) < 0})
    return f"to {', '.join(names)}" if names else f"({(str(error) or type(error).__name__).splitlines()[0]})"


def _hear_when_waiting(items: Any) -> None:
    """Let it be heard of a lost worker where its images are waited for.

    PyTorch's handler of SIGCHLD raises wherever the program happens to be: in the middle of a step or of a file, or of
    the message that a worker was lost.
    """
    if getattr(items, "_worker_pids_set", False):
        forget_workers(items)
        items._worker_pids_set = False
