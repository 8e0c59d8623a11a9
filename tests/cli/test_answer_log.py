"""The answers file: whole lines whatever the disk does, and nothing cut that was not looked at."""

import errno
import os
import zlib
from pathlib import Path
from typing import Any

import pytest

from faults import full_disk
from undrift import DataError
from undrift.cli import answer_log
from undrift.cli.answer_log import AnswerLog

ROWS = [(f"{number}.png", "red", 0.5, 0.25, 0.125) for number in range(9)]


class Grudging:
    """A file that takes a few bytes at a time, and at last no more; it notes how much was read at once."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room, self.read_sizes = file, room, []

    def write(self, content: memoryview) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = self.file.write(content[: min(7, self.room)])
        self.room -= taken
        return int(taken)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def started(path: Path) -> AnswerLog:
    log = AnswerLog(path, Path("s.state"))
    log.open_new(replace=False)
    log.start()
    return log


def test_a_disk_that_takes_a_part_gets_the_rest(tmp_path: Path) -> None:
    log, other = started(tmp_path / "a.csv"), started(tmp_path / "b.csv")
    log._file = Grudging(log._file, 10**6)
    for each in (log, other):
        each.add(ROWS)
        each.close()
    content = (tmp_path / "a.csv").read_bytes()
    assert content == (tmp_path / "b.csv").read_bytes()
    assert (log.offset, log.checksum) == (len(content), zlib.crc32(content))


@pytest.mark.parametrize("room", [0, 1, 40])
def test_a_full_disk_leaves_the_lines_before_and_no_more(tmp_path: Path, room: int) -> None:
    log = started(tmp_path / "a.csv")
    log.add(ROWS)
    before = (tmp_path / "a.csv").read_bytes()
    real = log._file
    log._file = Grudging(real, room)
    with pytest.raises(DataError, match=r"could not take more answers \(No space.*goes on from s\.state"):
        log.add(ROWS)
    assert (tmp_path / "a.csv").read_bytes() == before
    assert (log.offset, log.checksum) == (len(before), zlib.crc32(before))
    log._file = real
    log.add(ROWS)  # at the right place
    log.close()
    assert (tmp_path / "a.csv").read_bytes() == before + before[before.index(b"\n") + 1 :]


def test_a_disk_that_is_found_full_late(tmp_path: Path) -> None:
    log = started(tmp_path / "a.csv")
    with full_disk(), pytest.raises(DataError, match="could not take more answers"):
        log.sync()
    log.close()


def test_a_file_is_never_filled_up_with_zeros(tmp_path: Path) -> None:
    log = started(tmp_path / "a.csv")
    log.add(ROWS)
    os.truncate(tmp_path / "a.csv", 10)  # somebody else's doing
    log._file = Grudging(log._file, 0)
    with pytest.raises(DataError):
        log.add(ROWS)
    log.close()
    assert (tmp_path / "a.csv").stat().st_size == 10


def test_it_is_read_in_pieces_and_cut_only_where_it_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_log, "PIECE", 16)
    path = tmp_path / "a.csv"
    log = started(path)
    log.add(ROWS)
    log.close()
    content = path.read_bytes()
    path.write_bytes(content + b"half a li")
    sizes: list[int] = []
    opened = AnswerLog._open

    def watched(self: AnswerLog, mode: str) -> None:
        opened(self, mode)
        read = self._file.read
        self._file = Grudging(self._file, 0)
        self._file.read = lambda size: sizes.append(size) or read(size)  # type: ignore[attr-defined]

    monkeypatch.setattr(AnswerLog, "_open", watched)
    for wrong in ((log.offset, log.checksum + 1), (len(content) + 50, log.checksum)):
        again = AnswerLog(path, Path("s.state"))
        with pytest.raises(DataError, match=r"is not what this stream wrote.*remove s\.state.*deletes the answers"):
            again.go_on(*wrong)
        again.close()
        assert path.read_bytes() == content + b"half a li"
    again = AnswerLog(path, Path("s.state"))
    again.go_on(log.offset, log.checksum)
    again.close()
    assert path.read_bytes() == content
    assert max(sizes) == 16
    assert (again.offset, again.checksum) == (log.offset, log.checksum)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    log = started(tmp_path / "a.csv")
    log.add(ROWS)
    before = (tmp_path / "a.csv").read_bytes()
    for ask in (lambda other: other.open_new(replace=True), lambda other: other.go_on(log.offset, log.checksum)):
        other = AnswerLog(tmp_path / "a.csv", None)
        with pytest.raises(DataError, match=r"another process is writing .*a\.csv; needed: one process per file.*Wait"):
            ask(other)
        other.close()
    with pytest.raises(DataError, match="is there already"):
        AnswerLog(tmp_path / "a.csv", None).open_new(replace=False)
    assert (tmp_path / "a.csv").read_bytes() == before
    log.close()


def test_answers_that_come_before_the_lock_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"path,label")
    opened = AnswerLog._open

    def slow(self: AnswerLog, mode: str) -> None:
        if mode == "r+b":
            other.add(ROWS)  # another process, between the look at the file and the lock
            other.close()
        opened(self, mode)

    other = AnswerLog(path, None)
    other.open_new(replace=False)
    other.start()
    monkeypatch.setattr(AnswerLog, "_open", slow)
    log = AnswerLog(path, None)
    with pytest.raises(DataError, match="is there already"):
        log.open_new(replace=False)
    log.close()
    assert path.read_bytes().count(b"\n") == 10
