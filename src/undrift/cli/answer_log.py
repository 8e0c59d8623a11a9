"""The answers of a stream: a CSV that one process at a time appends whole lines to."""

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
from undrift.system.atomic import check
from undrift.system.interrupts import uninterrupted
from undrift.system.lock import locked

PIECE = 2**20  # bytes read at once: one read gives 2 GiB at most, and answers may be more than memory


class AnswerLog:
    """The open, locked file. What a failed write left behind is cut off again.

    Args:
        path: where it is.
        state: the file that knows how much of it is whole, if there is one; named where something is wrong.

    Attributes:
        offset: bytes of the whole lines.
        checksum: of those bytes.
        created: whether there was no such file before.
    """

    def __init__(self, path: Path, state: Path | None) -> None:
        self.path, self.state = path, state
        self.offset, self.checksum, self.created = 0, 0, False
        self._place = check(path)
        self._file: Any = None

    @property
    def without_answers(self) -> bool:
        """Whether there is a file that holds no more than the names of the columns, or their beginning.

        A stream that was killed before its first answer leaves that: nobody's work is lost with it.
        """
        if not self._place.is_file():  # to open a pipe would wait for ever
            return False
        try:
            with self._place.open("rb") as file:
                return _only_columns(file)
        except OSError:
            return False

    def open_new(self, replace: bool) -> None:
        """Open a new file or one without answers, with `replace` any; it stays as it is until `start`."""
        try:
            self._open("x+b")
            self.created = True
        except FileExistsError as error:  # perhaps since the command began
            if not replace and not self.without_answers:
                raise there_already(self.path) from error
            self._open("r+b")
            if not replace and not _only_columns(self._file):  # answers came before it was locked
                raise there_already(self.path) from error

    def start(self) -> None:
        """Begin with the names of the columns, in place of what was there."""
        self._cut()
        self.append_bytes(csv_lines([COLUMNS]))

    def go_on(self, offset: int, checksum: int) -> None:
        """Open the file and cut off what comes after so many bytes; raises, and cuts nothing, if these changed."""
        self._open("r+b")
        found, size = 0, 0
        while piece := self._file.read(min(PIECE, offset - size)):
            size, found = size + len(piece), zlib.crc32(piece, found)
        if (size, found) != (offset, checksum):
            raise DataError(
                f"{self.path} is not what this stream wrote ({size:,} of {offset:,} bytes, or others); needed: the "
                f"file as it was, which may only have grown. Put it back; to start anew, remove {self.state} and give "
                f"--force, which deletes the answers in {self.path}."
            )
        self.offset, self.checksum = offset, checksum
        self._cut()

    def add(self, rows: Sequence[Row]) -> None:
        """Append rows: all of them or none."""
        self.append_bytes(csv_lines(rows))

    def append_bytes(self, lines: bytes) -> None:
        """Append whole lines; Ctrl-C waits for them."""
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
        """Force the lines to the disk: a state must not know of answers that a power cut could take."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:  # some disks are found full no earlier
            raise DataError(self._full(error)) from error

    @property
    def empty(self) -> bool:
        """Whether it holds no answer."""
        return self.offset <= len(csv_lines([COLUMNS]))

    def close(self, remove: bool = False) -> None:
        """Close the file, or remove it."""
        if self._file is None:
            return
        if remove:
            with contextlib.suppress(OSError):
                self._place.unlink()  # while it is locked: afterwards it may be another's
        self._file.close()

    def _open(self, mode: str) -> None:
        """Open the file as it is, and lock it before anything in it is changed."""
        try:
            self._file = self._place.open(mode, buffering=0)  # what is written is the system's at once
        except FileExistsError:
            raise
        except OSError as error:
            anew = "" if self.state is None else f" To start anew, remove {self.state}."
            raise DataError(
                f"{self.path} cannot be opened ({error.strerror or error}); needed: a file for the answers. Check its "
                f"folder and its permissions, or put it back.{anew}"
            ) from error
        if not locked(self._file, self._place):
            raise another_process(self.path)

    def _write(self, lines: bytes) -> None:
        rest = memoryview(lines)
        while rest:  # a file without a buffer may take a part, as one does on a disk that is almost full
            taken = self._file.write(rest)
            if not taken:
                raise OSError(errno.EIO, "no more bytes were taken")
            rest = rest[taken:]

    def _cut(self) -> None:
        """Cut off what is after the whole lines."""
        if os.fstat(self._file.fileno()).st_size > self.offset:  # to cut a shorter file would fill it up with zeros
            os.ftruncate(self._file.fileno(), self.offset)
        with contextlib.suppress(OSError):  # a pipe has no place
            self._file.seek(self.offset)

    def _full(self, error: OSError) -> str:
        what = f"{self.path} could not take more answers ({error.strerror or error}); needed: room for them."
        if self.state is not None:
            return f"{what} Those before are whole. Free some space: the same command goes on from {self.state}."
        return (
            f"{what} Those before are whole. Free some space, and start again with another name, or with --force, "
            "which deletes them. With --state a stream can go on."
        )


def _only_columns(file: IO[bytes]) -> bool:
    columns = csv_lines([COLUMNS])
    return columns.startswith(file.read(len(columns) + 1))
