"""Write files whole or not at all: to a temporary file beside the target, synced, then renamed."""

import contextlib
import errno
import io
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from undrift._errors import DataError, OptionError
from undrift.system.lock import discard, marked
from undrift.system.validate import a_type

SHOWN = 100
"""Letters of a file's name in that of the file beside it: what is added must not make it too long."""


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Give an open file that becomes `path` if the `with` block succeeds, and disappears if it does not.

    An error or Ctrl-C inside the block leaves the old file untouched and no temporary file. Only `OSError` becomes a
    `DataError`, so compute first and write inside.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with writing(Path(folder) / "numbers.csv") as file:
        ...         _ = file.write(b"1,2")
        ...     Path(folder, "numbers.csv").read_text()
        '1,2'
    """
    place = check(path)
    for again in (False, True):
        # In the same folder, where the move is atomic. Opened plainly, so that the user's umask applies.
        beside = place.with_name(f".{place.name[:SHOWN]}.{uuid4().hex[:8]}.tmp")
        try:
            with beside.open("xb", 0) as raw, io.BufferedWriter(raw) as file:
                # Lock the raw file: a forked process closes it, and must not flush the buffer a second time.
                if marked(raw, beside) or again:  # else a sweep deleted it in between
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                    if sys.platform == "win32":  # an open file cannot be moved there
                        file.close()
                    beside.replace(place)  # while it is locked, so that no sweep takes it for a leftover
                    break
        except OSError as error:
            raise DataError(_facts(path, error)) from error
        finally:
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)
    sync_folder(place.parent)


def write_bytes(path: str | os.PathLike[str], content: bytes) -> int:
    """Write a whole file at once and return its size in bytes."""
    with writing(path) as file:
        file.write(content)
    return len(content)


def write_text(path: str | os.PathLike[str], content: str) -> int:
    """Write a whole text file (UTF-8) at once and return its size in bytes."""
    return write_bytes(path, content.encode())


def sweep(path: str | os.PathLike[str]) -> None:
    """Delete temporary files that a killed process left beside a file; those in use by another process stay."""
    place = check(path)
    rest = re.compile(rf"\.{re.escape(place.name)}\.[0-9a-f]{{8}}\.tmp")
    if len(place.name) > SHOWN:  # the shortened name could be another file's
        return
    with contextlib.suppress(OSError):  # a leftover does no harm
        for beside in [found for found in place.parent.iterdir() if rest.fullmatch(found.name)]:
            with contextlib.suppress(OSError):
                discard(beside)


def check(path: str | os.PathLike[str]) -> Path:
    """Return where a file will be moved to; raise at once, before hours of work, if that is impossible."""
    if not isinstance(path, str | os.PathLike):
        raise OptionError(
            f"the path is {path!r}, {a_type(path)}; needed: the name of a file to write. Give it as text."
        )
    place = Path(os.path.realpath(path))  # a link stays a link
    if place.is_dir():
        raise DataError(f"{path} is a folder; needed: the name of a file to write. Add a file name to it.")
    if not place.parent.is_dir():
        raise DataError(
            f"there is no folder {place.parent}; needed: an existing folder to write {place.name} into. "
            f"Make it first: mkdir -p {place.parent}"
        )
    return place


def _facts(path: str | os.PathLike[str], error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what, do = "the disk is full", "Free some space, or choose a folder on another disk"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        what, do = "its folder may not be written to", "Choose another folder, or change its permissions"
    else:
        what, do = error.strerror or str(error) or type(error).__name__, "Check the disk, or choose another folder"
    return f"{path} was not written: {what}. What stood there before is untouched. {do}, and write it again."


def sync_folder(folder: Path) -> None:
    """Make the move survive a power cut, on systems that can sync a folder."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
