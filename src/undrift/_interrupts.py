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
    for number in handlers:
        signal.signal(number, lambda came, _frame: pressed.append(came))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in pressed:  # by a call: a signal that is raised again would wake an event loop a second time
            handlers[number](number, None)
