"""A progress bar is a courtesy: no loop ends because nobody sees it."""

import errno
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from unittest import mock

import pytest
from torch import Tensor

import undrift
from adapt_support import small
from faults import Terminal, environment
from support import images


class Closed(Terminal):
    """A terminal that somebody closed."""

    def write(self, text: str) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def flush(self) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


@contextmanager
def on(terminal: Terminal | None) -> Iterator[None]:
    """Print errors on a terminal, or as Python has it under `2>&-`, on none."""
    with environment(TERM="xterm", COLUMNS="200"), redirect_stderr(terminal):
        yield
        assert sys.stderr is terminal


def asked(logits: Tensor) -> Tensor:
    time.sleep(0.13)  # rich draws every tenth of a second, in a thread
    return undrift.entropy(logits)


def adapt(progress: bool | None = None) -> None:
    undrift.adapt(small(), images(32), asked, epochs=1, batch_size=16, progress=progress)


def test_a_closed_terminal_ends_no_loop() -> None:
    with on(Closed()), mock.patch.object(threading, "excepthook") as raised:
        adapt()
    raised.assert_not_called()


def test_what_the_loop_raises_is_raised() -> None:
    def failing(_logits: Tensor) -> Tensor:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with on(Closed()), pytest.raises(OSError, match="No space"):
        undrift.adapt(small(), images(32), failing, epochs=1)


@pytest.mark.parametrize("shown", [None, True, False])
def test_without_stderr_there_is_no_bar(shown: bool | None) -> None:
    with on(None):
        adapt(shown)


def test_a_terminal_sees_the_bar() -> None:
    terminal = Terminal()
    with on(terminal):
        adapt()
    assert "adapt" in terminal.getvalue()
    assert "loss " in terminal.getvalue()


def test_the_bar_keeps_its_width_on_a_narrow_terminal() -> None:
    with environment(TERM="xterm", COLUMNS="80"), redirect_stderr(Terminal()) as terminal:
        undrift.adapt(small(), images(32), undrift.entropy, epochs=2, progress=True)
        shown = terminal.getvalue()
    assert "━" * 24 in shown
    assert "loss" in shown
