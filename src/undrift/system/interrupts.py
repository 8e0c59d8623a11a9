"""Ctrl-C and SIGTERM: who handles them, and how they wait for the end of something short."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


def handled() -> dict[int, Callable[[int, FrameType | None], Any]]:
    """Return the handlers of Ctrl-C and SIGTERM that a program has: none of one that is ignored, or the system's."""
    found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    return {int(number): handler for number, handler in found.items() if callable(handler)}


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back until a short `with` block is over, so that a step that was made is also counted.

    So is SIGTERM where a program handles it; where it does not, the process ends at once.
    """
    handlers = handled()
    if not handlers or threading.current_thread() is not threading.main_thread():
        yield  # signals arrive elsewhere
        return
    pressed: list[int] = []
    try:
        for number in handlers:
            signal.signal(number, lambda came, _frame: pressed.append(came))
        yield
    finally:
        _give_back(list(handlers.items()))
        for number in pressed:  # by a call: a signal that is raised again would wake an event loop a second time
            handlers[number](number, None)


def _give_back(handlers: list[tuple[int, Callable[[int, FrameType | None], Any]]]) -> None:
    """Put all handlers back, also where one that is in place again raises meanwhile."""
    if handlers:
        try:
            signal.signal(*handlers[0])
        finally:
            _give_back(handlers[1:])


def surely(put_back: Callable[[], object]) -> None:
    """Put something back, once more where Ctrl-C comes halfway: the second one it has to wait for."""
    try:
        put_back()
    except BaseException:
        put_back()
        raise
