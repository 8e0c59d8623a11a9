"""What goes wrong on a user's machine, one context manager each; and what a GPU would say."""

import errno
import io
import itertools
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType, SimpleNamespace
from unittest import mock


@contextmanager
def full_disk(times: int | None = None, after: int = 0) -> Iterator[None]:
    """Let no file be written to the end, or only so many not, after so many that are."""
    fsync, asked = os.fsync, itertools.count()

    def full(handle: int) -> None:
        number = next(asked) - after
        if number < 0 or (times is not None and number >= times):
            fsync(handle)
            return
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with mock.patch("os.fsync", full):
        yield
    assert next(asked) >= after + (times or 0)


@contextmanager
def environment(**values: str | None) -> Iterator[None]:
    """Set variables of the environment; None removes one."""
    with mock.patch.dict(os.environ, {name: value for name, value in values.items() if value is not None}):
        for name in (name for name, value in values.items() if value is None):
            os.environ.pop(name, None)
        yield


class Terminal(io.StringIO):
    """A terminal to print on."""

    def isatty(self) -> bool:
        return True


@contextmanager
def missing(*packages: str) -> Iterator[None]:
    """Let packages be as if they were not installed."""
    parts = [name for name in sys.modules if name.partition(".")[0] in packages]
    with mock.patch.dict(sys.modules, dict.fromkeys([*packages, *parts])):
        yield


@contextmanager
def installed(name: str, **content: object) -> Iterator[None]:
    """Let a package be there that has this content and no more."""
    module = ModuleType(name)
    module.__dict__.update(content)
    with mock.patch.dict(sys.modules, {name: module}):
        yield


def no_locks() -> AbstractContextManager[object]:
    """Let the file system have no locks."""
    return mock.patch("fcntl.flock", side_effect=OSError("no locks here"))


@contextmanager
def no_shared_memory() -> Iterator[None]:
    """Be one of two processes that decode images, without room in /dev/shm."""
    full = RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")
    worker = mock.patch("undrift.images.workers.get_worker_info", return_value=SimpleNamespace(num_workers=2))
    with worker, mock.patch("torch.Tensor.share_memory_", side_effect=full):
        yield


def interrupted(place: str) -> AbstractContextManager[object]:
    """Let Ctrl-C come where a function is called, which is named by its full path."""
    return mock.patch(place, side_effect=KeyboardInterrupt)


@contextmanager
def interrupted_after(owner: type, name: str) -> Iterator[None]:
    """Let Ctrl-C come as soon as a method has done its work: the signal itself, which may be held back."""
    method = getattr(owner, name)

    def stopped(*args: object, **kwargs: object) -> object:
        done = method(*args, **kwargs)
        signal.raise_signal(signal.SIGINT)
        return done

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with mock.patch.object(owner, name, stopped):
            yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def one_of_processes(rank: int, count: int = 2) -> Iterator[None]:
    """Be one of several processes of `torch.distributed`."""
    here = {"is_initialized": lambda: True, "get_rank": lambda: rank, "get_world_size": lambda: count}
    with mock.patch.multiple("torch.distributed", **here):
        yield


def recorded_in_a_graph(part: str = "norm") -> AbstractContextManager[object]:
    """Let norm layers, or the noise, believe that a CUDA graph is being recorded."""
    return mock.patch(f"undrift.posterior.{part}.capturing", return_value=True)


def bound_by_launches() -> AbstractContextManager[object]:
    """Let `predict` believe that launches, not arithmetic, take its time, as for small batches on a GPU."""
    return mock.patch("undrift.answer.fast_mode.launch_bound", return_value=True)
