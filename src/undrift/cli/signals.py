"""End a command in the same way on Ctrl-C and on SIGTERM (docker stop, systemd), with two exit codes."""

import contextlib
import signal
import threading
from collections.abc import Iterator

from undrift._errors import DataError
from undrift.system.interrupts import handled


@contextlib.contextmanager
def sigterm_as_ctrl_c() -> Iterator[list[int]]:
    """Let SIGTERM raise KeyboardInterrupt for a `with` block; the list is not empty if it came.

    A SIGTERM that the parent process ignores stays ignored.
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
    """Give a list that Ctrl-C and SIGTERM append to, so that the current batch can finish.

    The signal takes effect at the end of the `with` block, a second one at once.
    """
    pressed: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield pressed  # only the main thread gets signals
        return
    before = handled()  # without ignored signals

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
        # systemd stops every process of a service, the decoding ones too; the current batch then never comes.
        if not pressed or "processes that decode images was lost" not in str(error):
            raise
    finally:
        put_back()
    if pressed:
        before[pressed[0]](pressed[0], None)  # Python's handler and ours raise
        raise KeyboardInterrupt
