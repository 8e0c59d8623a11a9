"""What goes wrong on a user's machine, one context manager each; and what a GPU would say."""

import errno
import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest import mock


@contextmanager
def full_disk(times: int | None = None) -> Iterator[None]:
    """Let no file be written to the end, or only so many of the first not."""
    fsync, failed = os.fsync, list[int]()

    def full(handle: int) -> None:
        if times is not None and len(failed) >= times:
            fsync(handle)
            return
        failed.append(handle)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with mock.patch("os.fsync", full):
        yield
    assert times is None or len(failed) == times


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


def recorded_in_a_graph() -> AbstractContextManager[object]:
    """Let norm layers believe that a CUDA graph is being recorded."""
    return mock.patch("undrift.posterior.norm.capturing", return_value=True)


def bound_by_launches() -> AbstractContextManager[object]:
    """Let `predict` believe that launches, not arithmetic, take its time, as for small batches on a GPU."""
    return mock.patch("undrift.answer.fast_mode.launch_bound", return_value=True)
