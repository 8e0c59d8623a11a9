"""One process a file: the second is told so, and nothing stays locked that nobody holds."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from faults import no_locks
from undrift.system.lock import discard, held, locked, marked

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="has no such locks")


def test_the_second_does_not_get_it_and_the_third_does(tmp_path: Path) -> None:
    place = tmp_path / ".a.lock"
    with held(place) as first, held(place) as second:
        assert (first, second) == (True, False)
    assert not place.exists()
    with held(place) as third:
        assert third


def test_a_file_that_was_replaced_is_another(tmp_path: Path) -> None:
    place = tmp_path / "a.csv"
    with place.open("w") as old:
        place.unlink()
        assert not locked(old, place)
        place.write_text("")
        assert not locked(old, place)
        with place.open() as new:
            assert locked(new, place)


def test_a_lock_file_that_cannot_be_deleted_while_it_is_open_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "in use", missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)  # as on Windows
    for _ in range(2):
        with held(tmp_path / "lock") as mine:
            assert mine
    assert (tmp_path / "lock").exists()


def test_without_such_locks_everybody_gets_one(tmp_path: Path) -> None:
    with no_locks(), held(tmp_path / "a") as first, held(tmp_path / "a") as second:
        assert first
        assert second


CODE = """
import multiprocessing, os, sys, time
from pathlib import Path
from undrift.system.lock import held
with held(Path(sys.argv[1])) as mine:
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    print(mine, child.pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
def test_a_child_does_not_keep_the_lock_of_a_killed_parent(tmp_path: Path) -> None:
    place = tmp_path / ".a.lock"
    parent = subprocess.Popen([sys.executable, "-c", CODE, str(place)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    mine, child = parent.stdout.readline().split()
    try:
        with held(place) as ours:
            assert (mine, ours) == ("True", False)
        parent.kill()
        parent.wait()
        with held(place) as ours:
            assert ours
    finally:
        os.kill(int(child), signal.SIGKILL)
        parent.stdout.close()


def test_a_file_that_is_locked_or_could_be_is_not_discarded(tmp_path: Path) -> None:
    place = tmp_path / "a"
    with place.open("w") as file:
        assert marked(file, place)
        discard(place)
        assert place.exists()
    with no_locks():
        discard(place)
    assert place.exists()
    with place.open() as late:
        discard(place)
        assert not place.exists()
        assert not marked(late, place)
