"""Lock open files with `filelock`: a second process is refused, and a killed one leaves no lock.

Where there are no such locks (Windows, some network file systems) every process gets one.
"""

import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from filelock import lock_descriptor

_LOCKED: "weakref.WeakSet[IO[Any]]" = weakref.WeakSet()


def marked(file: IO[Any], place: Path) -> bool:
    """Lock an open file until it is closed; False if another process holds it, or the path is gone."""
    if _lock(file) is False:
        return False
    _LOCKED.add(file)
    return place.exists()


def locked(file: IO[Any], place: Path) -> bool:
    """Lock an open file until it is closed; False if another process holds it, or the path is another file now."""
    # Whoever held it may have released and deleted it since we opened it.
    return marked(file, place) and os.path.samestat(os.fstat(file.fileno()), place.stat())


@contextmanager
def held(place: Path) -> Iterator[bool]:
    """Hold a lock file for the length of a `with` block, then delete it; False if another process holds it."""
    with place.open("w") as file:
        mine = locked(file, place)
        try:
            yield mine
        finally:
            if mine:
                with suppress(OSError):  # Windows deletes no open file; it stays, unlocked
                    place.unlink()


def discard(place: Path) -> None:
    """Delete a file unless a process has locked it, or could have: where there are no locks, it stays."""
    if sys.platform == "win32":  # no open file is deleted there
        place.unlink()
        return
    with place.open("r+b") as file:
        if _lock(file):  # held while we delete, so that whoever is about to lock it sees that it is gone
            place.unlink()


def _lock(file: IO[Any]) -> bool | None:
    """Lock an open file; False where another process has it, None where there are no locks."""
    if sys.platform == "win32":  # its locks keep others from reading, too
        return None
    try:
        return lock_descriptor(file.fileno(), blocking=False)
    except OSError:  # a file system without locks
        return None


def _close_all() -> None:
    """Close in a forked process what its parent has locked.

    Otherwise processes that decode images, which outlive a killed parent by seconds, would lock out its successor.
    """
    for file in list(_LOCKED):
        file.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)
