"""A progress bar is a courtesy: no loop ends because nobody sees it."""

import errno
import io
import os
import sys
import threading
import time

import pytest

from undrift.system.progress import Bar


class Closed(io.StringIO):
    """A terminal that somebody closed."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def flush(self) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def close_stderr(monkeypatch: pytest.MonkeyPatch) -> Closed:
    """Put a closed terminal in the place of stderr; not a fixture, after which pytest puts in its own."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", closed := Closed())
    return closed


def test_a_closed_terminal_ends_no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = close_stderr(monkeypatch)
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    with Bar("adapt", total=3) as bar:
        bar.advance(loss=0.5)
        time.sleep(0.25)  # rich draws every tenth of a second, in a thread
        bar.say("verdict")
        bar.advance()
    assert sys.stderr is closed
    assert raised == []


def test_what_the_loop_raises_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = close_stderr(monkeypatch)
    with pytest.raises(OSError, match="No space"), Bar("adapt", total=3):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert sys.stderr is closed


@pytest.mark.parametrize("shown", [None, True, False])
def test_without_stderr_there_is_no_bar(monkeypatch: pytest.MonkeyPatch, shown: bool | None) -> None:
    monkeypatch.setattr(sys, "stderr", None)  # as Python has it under `2>&-`
    with Bar("adapt", total=1, shown=shown) as bar:
        bar.advance()


def test_a_terminal_sees_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = io.StringIO()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", stderr)
    with Bar("adapt", total=2) as bar:
        bar.advance(2, loss=0.5)
    assert "adapt" in stderr.getvalue()
    assert "loss 0.5" in stderr.getvalue()
