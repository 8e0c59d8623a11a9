"""Hold Ctrl-C and SIGTERM back until a short critical section is over."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


def handled() -> dict[int, Callable[[int, FrameType | None], Any]]:
    """Return a program's own handlers of Ctrl-C and SIGTERM, without ignored signals and the system's defaults."""
    found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    return {int(number): handler for number, handler in found.items() if callable(handler)}


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back until a short `with` block is over, for example to make a step and count it.

    SIGTERM is held back too if the program handles it; otherwise the process ends at once.
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
        for number in pressed:  # call the handler: raising the signal again would wake an event loop twice
            handlers[number](number, None)


def _give_back(handlers: list[tuple[int, Callable[[int, FrameType | None], Any]]]) -> None:
    """Restore all handlers, even if one that is restored raises meanwhile."""
    if handlers:
        try:
            signal.signal(*handlers[0])
        finally:
            _give_back(handlers[1:])


def surely(put_back: Callable[[], object]) -> None:
    """Run a restoring function; if Ctrl-C interrupts it, run it again while holding Ctrl-C back."""
    try:
        put_back()
    except BaseException:
        put_back()
        raise
