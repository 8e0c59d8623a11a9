"""Append a stream's answers to a CSV file: whole lines only, one process at a time."""

import contextlib
import errno
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from undrift._errors import DataError
from undrift.cli.answers import COLUMNS, Row, csv_lines
from undrift.cli.output_paths import another_process, there_already
from undrift.system.atomic import check, sync_folder
from undrift.system.interrupts import uninterrupted
from undrift.system.lock import locked

PIECE = 2**20  # bytes per read: one read gives 2 GiB at most, and a file may exceed the memory


class AnswerLog:
    """The open, locked file of answers. A failed write is cut off again.

    Args:
        path: the file.
        state: the stream's state file, if any, which error messages name.

    Attributes:
        offset: bytes of the whole lines.
        checksum: CRC-32 of those bytes.
        created: whether the file is new.
    """

    def __init__(self, path: Path, state: Path | None) -> None:
        self.path, self.state = path, state
        self.offset, self.checksum, self.created = 0, 0, False
        self._place = check(path)
        self._file: Any = None

    @property
    def without_answers(self) -> bool:
        """Whether the file exists and holds at most the header.

        A stream that was killed before its first answer leaves such a file, which may be replaced.
        """
        if not self._place.is_file():  # opening a pipe would block
            return False
        try:
            with self._place.open("rb") as file:
                return _only_columns(file)
        except OSError:
            return False

    def open_new(self, replace: bool) -> None:
        """Open a new file, or one without answers; with `replace`, any file. `start` then empties it."""
        try:
            self._open("x+b")
            self.created = True
        except FileExistsError as error:  # it may have appeared since the command began
            if not replace and not self.without_answers:
                raise there_already(self.path) from error
            self._open("r+b")
            if not replace and not _only_columns(self._file):  # answers arrived before the lock
                raise there_already(self.path) from error

    def start(self) -> None:
        """Empty the file and write the header."""
        self._cut()
        self.append_bytes(csv_lines([COLUMNS]))

    def go_on(self, offset: int, checksum: int) -> None:
        """Open the file and cut it off after `offset` bytes; raise, and cut nothing, if these bytes have changed."""
        self._open("r+b")
        self.compare(self._file, self.path, offset, checksum)
        self.offset, self.checksum = offset, checksum
        self._cut()

    def compare(self, file: IO[bytes], path: Path, offset: int, checksum: int) -> None:
        """Raise unless a file begins with these bytes."""
        found, size = 0, 0
        while piece := file.read(min(PIECE, offset - size)):
            size, found = size + len(piece), zlib.crc32(piece, found)
        if (size, found) != (offset, checksum):
            raise DataError(
                f"{path} is not what this stream wrote ({size:,} of {offset:,} bytes, or other content); needed: "
                f"the unchanged file. Restore it; to start over, remove {self.state} and give --force, which deletes "
                f"the answers in {self.path}."
            )

    def turn_over(self, aside: Path) -> None:
        """Move the file aside, whole, and go on in a new one."""
        with uninterrupted():
            self.sync()
            full = self._file
            try:
                if aside.exists():
                    raise there_already(aside)
                self._place.rename(aside)
                self._open("x+b")
            except OSError as error:
                raise DataError(self._full(error)) from error
            full.close()
            self.begin_empty()

    def begin_empty(self) -> None:
        """Begin a new file with nothing but the header, where the one before was moved aside."""
        self.offset, self.checksum = 0, 0
        self.start()
        self.sync()
        sync_folder(self._place.parent)

    def add(self, rows: Sequence[Row]) -> None:
        """Append all rows, or none."""
        self.append_bytes(csv_lines(rows))

    def append_bytes(self, lines: bytes) -> None:
        """Append whole lines; Ctrl-C waits until they are written."""
        with uninterrupted():
            try:
                self._write(lines)
            except BaseException as error:
                with contextlib.suppress(OSError):
                    self._cut()
                if isinstance(error, OSError):
                    raise DataError(self._full(error)) from error
                raise
            self.offset += len(lines)
            self.checksum = zlib.crc32(lines, self.checksum)

    def sync(self) -> None:
        """Flush the lines to the disk, so that no state counts answers that a power cut could lose."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:  # some file systems report a full disk only here
            raise DataError(self._full(error)) from error

    @property
    def empty(self) -> bool:
        """Whether the file holds no answer."""
        return self.offset <= len(csv_lines([COLUMNS]))

    def close(self, remove: bool = False) -> None:
        """Close the file, or remove it."""
        if self._file is None:
            return
        if remove:
            with contextlib.suppress(OSError):
                self._place.unlink()  # while locked: later, the file may be another process's
        self._file.close()

    def _open(self, mode: str) -> None:
        """Open the file without changing it, and lock it."""
        try:
            self._file = self._place.open(mode, buffering=0)
        except FileExistsError:
            raise
        except OSError as error:
            anew = "" if self.state is None else f" To start over, remove {self.state}."
            raise DataError(
                f"{self.path} cannot be opened ({error.strerror or error}); needed: a file for the answers. Check its "
                f"folder and permissions, or restore it.{anew}"
            ) from error
        if not locked(self._file, self._place):
            raise another_process(self.path)

    def _write(self, lines: bytes) -> None:
        rest = memoryview(lines)
        while rest:  # an unbuffered write may take only a part, for example on an almost full disk
            taken = self._file.write(rest)
            if not taken:
                raise OSError(errno.EIO, "no bytes were written")
            rest = rest[taken:]

    def _cut(self) -> None:
        """Cut off what follows the whole lines."""
        if os.fstat(self._file.fileno()).st_size > self.offset:  # truncating a shorter file would pad it with zeros
            os.ftruncate(self._file.fileno(), self.offset)
        with contextlib.suppress(OSError):  # a pipe cannot seek
            self._file.seek(self.offset)

    def _full(self, error: OSError) -> str:
        what = (
            f"{self.path} could not take more answers ({error.strerror or error}); needed: room for them. Those "
            "already written are whole. Free some space"
        )
        if self.state is not None:
            return f"{what}: the same command goes on from {self.state}."
        return (
            f"{what}, and start again under another name, or with --force, which deletes them. With --state, a stream "
            "can be resumed."
        )


def _only_columns(file: IO[bytes]) -> bool:
    columns = csv_lines([COLUMNS])
    return columns.startswith(file.read(len(columns) + 1))
