"""Locks that end with their process: of two that want one file the second is told so, and a kill leaves nothing locked.

Where there are no such locks (Windows, some network file systems) everybody gets one.
"""

import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

_LOCKED: "weakref.WeakSet[IO[Any]]" = weakref.WeakSet()


def marked(file: IO[Any], place: Path) -> bool:
    """Lock an open file until it is closed; False where another process has it, or nothing is at its place any more."""
    if _taken(file) is False:
        return False
    _LOCKED.add(file)
    return place.exists()


def locked(file: IO[Any], place: Path) -> bool:
    """Lock an open file until it is closed; False where another process has it, or it is at its place no more."""
    # Whoever had it may have let it go and deleted it: it is nobody's then, or the next one's.
    return marked(file, place) and os.path.samestat(os.fstat(file.fileno()), place.stat())


@contextmanager
def held(place: Path) -> Iterator[bool]:
    """Hold a lock file for the length of a `with` block; False where another process has it. It is gone afterwards."""
    with place.open("w") as file:
        mine = locked(file, place)
        try:
            yield mine
        finally:
            if mine:
                with suppress(OSError):  # Windows deletes no file that is open: it stays, and is nobody's
                    place.unlink()


def discard(place: Path) -> None:
    """Delete a file unless a process has locked it, or could have: where there are no locks, it stays."""
    if sys.platform == "win32":  # what is open is not deleted there
        place.unlink()
        return
    with place.open("r+b") as file:
        if _taken(file):  # and keeps it meanwhile: whoever is just about to lock it is told that it is gone
            place.unlink()


def _taken(file: IO[Any]) -> bool | None:
    """Lock an open file; False where another process has it, None where there are no locks."""
    if sys.platform == "win32":
        return None
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return None
    return True


def _let_go() -> None:
    """Close in a forked process what its parent has locked.

    Else processes that decode images, which outlive a killed parent by seconds, would lock out whoever starts it again.
    """
    for file in list(_LOCKED):
        file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
