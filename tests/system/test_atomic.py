"""A file is written whole or not at all, and what a kill left is swept up."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

import undrift
from undrift.system import atomic
from undrift.system.lock import marked


def test_ctrl_c_and_errors_leave_what_was_there(tmp_path: Path) -> None:
    place = tmp_path / "a.txt"
    atomic.write_text(place, "old")
    for error in (KeyboardInterrupt, ValueError):
        with pytest.raises(error), atomic.writing(place) as file:  # noqa: PT012
            file.write(b"new, half")
            raise error
    assert place.read_text() == "old"
    assert list(tmp_path.iterdir()) == [place]


def test_a_sweep_takes_what_a_kill_left_and_nothing_else(tmp_path: Path) -> None:
    place, rest = tmp_path / "a.csv", tmp_path / ".a.csv.0123abcd.tmp"
    for name in (rest.name, ".a.csv.mine.tmp", ".b.csv.0123abcd.tmp"):
        (tmp_path / name).write_text("half")
    with atomic.writing(place) as file:
        file.write(b"whole")
        atomic.sweep(place)  # as another process would, which starts meanwhile
        assert not rest.exists()
        assert len(list(tmp_path.iterdir())) == 3
    assert place.read_text() == "whole"


def test_a_sweep_between_making_a_file_and_locking_it_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept: list[Path] = []

    def late(file: IO[bytes], beside: Path) -> bool:
        if not swept:
            swept.append(beside)
            atomic.sweep(tmp_path / "a.csv")
        return marked(file, beside)

    monkeypatch.setattr(atomic, "marked", late)
    atomic.write_text(tmp_path / "a.csv", "whole")
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]
    assert not swept[0].exists()


FORKING = """
import os, sys
from undrift.system.atomic import writing
with writing(sys.argv[1]) as file:
    file.write(b"once")
    if not (child := os.fork()):
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_writes_nothing_of_it_again(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", FORKING, tmp_path / "a"], check=True)
    assert (tmp_path / "a").read_bytes() == b"once"


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(undrift.DataError, match=r"is a folder.*file name"):
        atomic.write_bytes(tmp_path, b"")
    with pytest.raises(undrift.DataError, match=r"no folder.*mkdir -p"):
        atomic.write_bytes(tmp_path / "no" / "a.txt", b"")
    for number, words in ((errno.EACCES, "may not be written"), (errno.EIO, "Input/output error")):
        assert words in atomic._facts("a", OSError(number, os.strerror(number)))


def test_links_and_permissions_stay_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "real.txt").write_text("old")
    (tmp_path / "link.txt").symlink_to(tmp_path / "real.txt")
    atomic.write_text(tmp_path / "link.txt", "new")
    assert (tmp_path / "link.txt").is_symlink()
    assert (tmp_path / "real.txt").read_text() == "new"
    (tmp_path / "plain.txt").write_text("")
    modes = {(tmp_path / n).stat().st_mode for n in ("real.txt", "plain.txt")}
    assert len(modes) == 1
