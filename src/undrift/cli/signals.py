"""Being asked to end, by Ctrl-C or by SIGTERM (docker stop, systemd): one way out, and two exit codes."""

import contextlib
import signal
import threading
from collections.abc import Iterator

from undrift._errors import DataError
from undrift.system.interrupts import handled


@contextlib.contextmanager
def sigterm_as_ctrl_c() -> Iterator[list[int]]:
    """Let SIGTERM end a command as Ctrl-C does, files swept up and what was kept said; the list says whether it came.

    It stays ignored where whoever started the process had it ignored.
    """
    came: list[int] = []
    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield came
        return

    def end(number: int, _frame: object) -> None:
        came.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
    try:
        yield came
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def stopping_between_batches() -> Iterator[list[int]]:
    """Give a list that Ctrl-C and SIGTERM put something into, so that the batch under way ends well.

    They take effect when the `with` block is over; a second one does at once.
    """
    pressed: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield pressed  # signals arrive elsewhere
        return
    before = handled()  # ignored ones stay so

    def put_back() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def press(number: int, _frame: object) -> None:
        pressed.append(number)
        put_back()

    for number in before:
        signal.signal(number, press)
    try:
        yield pressed
    except DataError as error:
        # systemd asks every process of a service to end: those that decode have, and the batch under way never comes.
        if not pressed or "processes that decode images was lost" not in str(error):
            raise
    finally:
        put_back()
    if pressed:
        before[pressed[0]](pressed[0], None)  # which raises, if it is Python's or ours
        raise KeyboardInterrupt
