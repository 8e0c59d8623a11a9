"""A stream that can be stopped at any moment: answers appended in whole lines, and a state that knows how many.

The state names the bytes of the answers that belong to it. A stream that goes on cuts off what was appended after its
state was written, and makes it again: no line is lost, none comes twice.
"""

import contextlib
import io
import os
import signal
import struct
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from undrift._atomic import write_bytes
from undrift._errors import DataError, PerturbationMismatch
from undrift._step import uninterrupted
from undrift.cli._answers import COLUMNS, Row, csv_lines
from undrift.cli._images import InOrder, name_of
from undrift.cli._session import Session
from undrift.data import Domain
from undrift.fingerprint import fingerprint
from undrift.perturb import Perturbed
from undrift.stream import Stream
from undrift.zoo._checkpoint import UNREADABLE

FORMAT = "undrift stream 1"


@dataclass(frozen=True)
class Saved:
    """Where a stream stood.

    Attributes:
        position: images of the domain that are done with.
        offset: bytes of the answers that belong to them.
        checksum: of those bytes.
        skipped: images that could not be read so far, each with its reason.
        stream: what `Stream.state_dict` gave.
    """

    position: int
    offset: int
    checksum: int
    skipped: Mapping[str, str]
    stream: Mapping[str, Any]


class AnswerLog:
    """A CSV that grows by whole lines: what a failed write left behind is cut off again."""

    def __init__(self, path: Path, saved: Saved | None) -> None:
        self.path = path
        self.offset, self.checksum = 0, 0
        if saved is None:
            self._file = self._open("wb")
            try:
                self.append_bytes(csv_lines([COLUMNS]))
            except BaseException:
                self.close()
                raise
            return
        self._file = self._open("r+b")
        found = self._file.read(saved.offset)
        if len(found) != saved.offset or zlib.crc32(found) != saved.checksum:
            self._file.close()
            raise DataError(
                f"{path} is not what this stream wrote ({len(found)} of {saved.offset} bytes, or others); needed: the "
                "file as it was, which may only have grown. Put it back, or start anew with --force."
            )
        self._file.truncate(saved.offset)
        self._file.seek(saved.offset)
        self.offset, self.checksum = saved.offset, saved.checksum

    def add(self, rows: Sequence[Row]) -> None:
        """Append rows: all of them or none."""
        self.append_bytes(csv_lines(rows))

    def append_bytes(self, lines: bytes) -> None:
        """Append whole lines; Ctrl-C waits for them."""
        with uninterrupted():
            try:
                self._file.write(lines)
                self._file.flush()
            except OSError as error:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file.fileno(), self.offset)
                raise DataError(
                    f"{self.path} could not take more answers ({error.strerror or error}); needed: room for them. "
                    "Those before are whole. Free some space; with --state the same command goes on."
                ) from error
            self.offset += len(lines)
            self.checksum = zlib.crc32(lines, self.checksum)

    def sync(self) -> None:
        """Force the lines to the disk: a state must not know of answers that a power cut could take."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _open(self, mode: str) -> Any:
        try:
            return self.path.open(mode, buffering=0)
        except OSError as error:
            raise DataError(
                f"{self.path} cannot be opened ({error.strerror or error}); needed: a file for the answers. Check its "
                "folder and its permissions, or start anew with --force."
            ) from error


class Keeper:
    """Writes the state from time to time, and knows what Ctrl-C would leave."""

    def __init__(self, session: Session, log: AnswerLog, state: Path | None, identity: Mapping[str, Any]) -> None:
        self.session, self.log, self.path, self.identity = session, log, state, identity

    def note(self, left: InOrder, going: Stream, skipped: Mapping[str, str], write: bool) -> None:
        """Take note that the stream is done with some images."""
        answers = f"{self.log.path} holds {going.report.images:,} answers, in whole lines"
        if self.path is None:
            self.session.kept = f"{answers}. With --state FILE a stream can go on where it was stopped."
        elif write:
            self.log.sync()
            where = left.position, self.log.offset, self.log.checksum
            write_state(self.path, self.identity, Saved(*where, dict(skipped), going.state_dict()))
            self.session.kept = f"{answers}, and {self.path} where it stands; the same command goes on from there."


def identity_of(model: Perturbed, images: Domain, domain_file: Path | None) -> dict[str, Any]:
    """Return what of the network and the images must be the same for two streams to be one."""
    names = "\n".join(name_of(images, place) for place in range(len(images)))
    return {
        "source network": fingerprint(model),
        "domain file": None if domain_file is None else zlib.crc32(domain_file.read_bytes()),
        "number of images": len(images),
        "names of images": zlib.crc32(names.encode()),
        "preprocessing": str(images.preprocess),
        "classes": model.classes,
    }


def write_state(path: Path, identity: Mapping[str, Any], saved: Saved) -> None:
    """Write where a stream stands, whole or not at all."""
    content = io.BytesIO()
    torch.save({"undrift": FORMAT, "identity": dict(identity), **vars(saved)}, content)
    write_bytes(path, content.getvalue())


def read_state(path: Path, identity: Mapping[str, Any]) -> Saved:
    """Return where this very stream stood; nothing in the file is executed."""
    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(found, dict) or found.get("undrift") != FORMAT:
            raise ValueError("another kind of file")
        theirs = found["identity"]
        saved = Saved(*(found[name] for name in ("position", "offset", "checksum", "skipped", "stream")))
    except (*UNREADABLE, struct.error) as error:
        raise DataError(
            f"{path} is not the state of a stream ({type(error).__name__}: {str(error).splitlines()[0]}); needed: what "
            "`undrift stream --state` wrote. Name another file, or start anew with --force."
        ) from error
    other = [f"{k} {_short(theirs.get(k))} there, {_short(v)} here" for k, v in identity.items() if theirs.get(k) != v]
    if other:
        raise PerturbationMismatch(
            f"{path} is the state of another stream ({'; '.join(other[:3])}); needed: the same network, options and "
            "images. Use those, name another file, or start anew with --force."
        )
    return saved


@contextlib.contextmanager
def stopping_between_batches() -> Iterator[list[int]]:
    """Give a list that Ctrl-C puts something into, so that the batch under way ends well; a second stops at once."""
    pressed: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield pressed  # signals arrive elsewhere
        return
    before = signal.getsignal(signal.SIGINT)

    def press(number: int, _frame: object) -> None:
        pressed.append(number)
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:12] + "…"
