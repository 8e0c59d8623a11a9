"""A stream of a month is killed, fills its disk, loses its folder and its clock: every image is answered once.

What is left in the end is compared bit for bit with a stream that nothing happened to.
"""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from faults import environment
from undrift import DataError
from undrift.cli import image_arguments, resumable, stream_state
from undrift.cli.answer_log import AnswerLog
from undrift.cli.image_arguments import check_available
from undrift.cli.stream_state import latest, read_state
from undrift.images.sources import FileSource

from .conftest import MODEL, STRICT, Run, StopWhen, leftovers, start

SLOW = ("--model", "tiny_of_tests:slow", *MODEL[2:])
FILES = ("--answers", "s.csv", "--state", "s.state", "--state-every", "2", "--out", "s.safetensors")
STREAM = ("stream", "target", *FILES, "--batch-size", "3", "--lr", "0.01")
Left = tuple[bytes, bytes]


@pytest.fixture
def undisturbed(run: Run) -> Left:
    """Return the answers and the domain file of a stream that nothing happens to, and remove its files."""
    assert run(*STREAM, *MODEL).code == 0
    return taken()


def taken() -> Left:
    """Return what a stream left, its files of answers as one; remove them."""
    parts = [*sorted(Path().glob("s.0*.csv")), Path("s.csv")]
    header, *_ = parts[0].read_bytes().partition(b"\n")
    answers = b"".join(part.read_bytes().removeprefix(header + b"\n") for part in parts)
    found = answers, Path("s.safetensors").read_bytes()
    for path in (*parts, Path("s.state"), Path("s.safetensors")):
        path.unlink()
    return found


# The answers are rotated --------------------------------------------------------------------------------------------


def test_answers_are_moved_aside_when_they_are_full(run: Run, undisturbed: Left) -> None:
    found = run(*STREAM, *MODEL, "--rotate-mb", "0.0003", "--json")
    assert found.code == 0, found.err
    parts = sorted(path.name for path in Path().glob("s.0*.csv"))
    assert len(parts) > 2
    assert parts == [f"s.{number + 1:06}.csv" for number in range(len(parts))]
    assert set(parts) < set(found.json["wrote"])
    assert all(b"path,label" in Path(part).read_bytes().splitlines()[0] for part in (*parts, "s.csv"))
    assert taken() == undisturbed


@pytest.mark.parametrize("step", ["before the move", "after the move", "in the new header", "before the new state"])
def test_a_kill_in_a_rotation_loses_and_repeats_nothing(
    step: str, run: Run, undisturbed: Left, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise SystemExit("killed")

    real, kept = AnswerLog.begin_empty, resumable.StreamFiles._turn_over

    def half(log: AnswerLog) -> None:
        log.offset = log.checksum = 0
        log._cut()
        log.append_bytes(b"path,la")
        killed()

    def done(files: resumable.StreamFiles) -> None:
        kept(files)
        killed()

    patches: dict[str, tuple[object, str, Callable[..., None]]] = {
        "before the move": (AnswerLog, "turn_over", killed),
        "after the move": (AnswerLog, "begin_empty", killed),
        "in the new header": (AnswerLog, "begin_empty", half),
        "before the new state": (resumable.StreamFiles, "_turn_over", done),
    }
    words = (*STREAM, *MODEL, "--rotate-mb", "0.0003")
    with monkeypatch.context() as patch:
        patch.setattr(*patches[step])
        with pytest.raises(SystemExit):
            run(*words)
    assert real is AnswerLog.begin_empty
    found = run(*words)
    assert found.code == 0, found.err
    assert len(list(Path().glob("s.0*.csv"))) > 2
    assert taken() == undisturbed


def test_a_new_stream_numbers_its_files_after_those_of_another(run: Run) -> None:
    Path("s.000004.csv").write_text("mine")
    assert run(*STREAM, *MODEL, "--rotate-mb", "0.0003").code == 0
    assert Path("s.000004.csv").read_text() == "mine"
    assert not Path("s.000001.csv").exists()
    assert Path("s.000005.csv").exists()


# The folder vanishes ------------------------------------------------------------------------------------------------


VANISHING = """
from pathlib import Path
from tiny_of_tests import Tiny

class Vanishing(Tiny):
    "Loses its images once there are twelve answers."

    def forward(self, x):
        known = Path("s.csv").read_bytes().count(b"\\n") if Path("s.csv").exists() else 0
        if known > 12 and Path("target").exists() and not Path("back").exists():
            Path("target").rename("away")
        return super().forward(x)
"""


def test_a_folder_that_vanishes_is_no_damage(run: Run, work: Path, undisturbed: Left) -> None:
    (work / "vanishing.py").write_text(VANISHING)
    words = (*STREAM, "--model", "vanishing:Vanishing", *MODEL[2:])
    with environment(UNDRIFT_WORKERS="0"):
        found = run(*words)
    assert (found.code, "is out of reach" in found.err, "Traceback" in found.err) == (1, True, False), found.err
    assert "skipped" not in found.err  # the next run answers them
    found = run(*words)
    assert found.code != 0  # it is still away
    Path("away").rename("target")
    Path("back").touch()
    found = run(*words, "--json")
    assert (found.code, found.json["skipped"]) == (0, {}), found.err
    assert taken()[0] == undisturbed[0]  # a domain file names its network


def test_what_is_out_of_reach_and_what_is_damaged(tmp_path: Path) -> None:
    paths = [str(tmp_path / "a" / f"{number}.png") for number in range(3)]
    sources = [FileSource(path) for path in paths]
    (tmp_path / "a").mkdir()
    for path in paths:
        Path(path).touch()
    gone = f"[Errno 2] No such file or directory: '{paths[1]}'"
    check_available(sources, {paths[1]: "not in a format that Pillow knows"})
    check_available(sources, {paths[1]: "[Errno 5] Input/output error"})  # a bad sector
    with pytest.raises(DataError, match=r"out of reach.*needed.*--state"):
        check_available(sources, {paths[1]: gone})  # it is back
    Path(paths[1]).unlink()
    check_available(sources, {paths[1]: gone})  # deleted
    Path(paths[0]).unlink()
    Path(paths[2]).unlink()
    with pytest.raises(DataError, match="out of reach"):
        check_available(sources, {paths[1]: gone})  # an unmounted folder is an empty one


# The page cannot be written ------------------------------------------------------------------------------------------


BLOCKING = """
from pathlib import Path
from tiny_of_tests import Tiny

class Blocking(Tiny):
    "Puts a folder in the place of its page."

    def forward(self, x):
        if Path("r.html").is_file():
            Path("r.html").unlink()
            Path("r.html").mkdir()
        return super().forward(x)
"""


def test_a_page_that_cannot_be_written_costs_no_domain_file(run: Run, work: Path) -> None:
    (work / "blocking.py").write_text(BLOCKING)
    found = run(*STREAM, "--model", "blocking:Blocking", *MODEL[2:], "--report", "r.html")
    assert (found.code, "r.html" in found.err, "Traceback" in found.err) == (1, True, False), found.err
    assert Path("s.safetensors").exists()


# The clock jumps ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jump", [-86_400.0, 86_400.0])
def test_a_clock_that_jumps_changes_nothing(
    jump: float, run: Run, undisturbed: Left, stop_when: StopWhen, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, calls = time.time, itertools.count()
    monkeypatch.setattr(time, "time", lambda: now() + jump * (next(calls) > 2))
    stop_when("s.csv", 13, *STREAM, *MODEL)
    assert run(*STREAM, *MODEL).code == 0
    assert taken() == undisturbed


def test_a_half_written_image_waits_though_the_clock_was_set_back(
    run: Run, undisturbed: Left, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = max(Path("target").rglob("*.png"))
    whole = last.read_bytes()
    last.write_bytes(whole[:20])
    os.utime(last, (1.0, 1.0))  # its date is of the clock before
    begun, now = itertools.count(), time.time
    monkeypatch.setattr(image_arguments.time, "time", lambda: now() - 3600 * (next(begun) > 0))
    found = run(*STREAM, *MODEL, "--json")
    assert found.code == 0, found.err
    assert [Path(name).name for name in found.json["unfinished"]] == [last.name]
    last.write_bytes(whole)


# The state stays small ----------------------------------------------------------------------------------------------


def test_a_state_names_the_latest_damaged_images_and_counts_all(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    many = {str(number): "broken" for number in range(5000)}
    assert list(latest(many)) == [str(number) for number in range(4000, 5000)]
    for number in (0, 4, 10):
        path = next(Path("target").rglob(f"{number:02}.png"))
        path.write_bytes(path.read_bytes()[:20])
    monkeypatch.setattr(stream_state, "REMEMBERED", 2)
    found = run(*STREAM, *MODEL, "--json")
    saved = read_state(Path("s.state"))
    assert not isinstance(saved, str)
    assert (len(saved.skipped), saved.unreadable, found.json["unreadable"]) == (2, 3, 3)
    assert run(*STREAM, *MODEL, "--json").json["unreadable"] == 3  # nothing left to do


# As an operator meets it --------------------------------------------------------------------------------------------


def answered(work: Path) -> int:
    """Return how many answers there are, in all files."""
    return sum(path.read_bytes().count(b"\n") - 1 for path in work.glob("s*.csv"))


LIMITED = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)), -1))
from undrift.cli import main
sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
@pytest.mark.parametrize("rotate", [(), ("--rotate-mb", "0.0003")])
def test_a_stream_that_is_killed_again_and_again(rotate: tuple[str, ...], run: Run, work: Path) -> None:
    assert run(*STREAM, *SLOW).code == 0  # a domain file names its network
    undisturbed = taken()
    chance, kills = random.Random(0), 0
    words = (*STREAM, *SLOW, "--health", "health.json", *rotate)
    for number in itertools.cycle((signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGINT)):
        wanted, end = answered(work) + chance.randint(1, 12), time.monotonic() + 60
        process = start(work, *words)
        while answered(work) < wanted and process.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        assert "Traceback" not in err
        kills += process.returncode != 0
        if process.returncode == 0:
            break
        assert process.returncode in (-signal.SIGKILL, 143, 130), err
        assert kills < 30
    assert kills > 2
    assert json.loads((work / "health.json").read_text())["status"] == "done"
    assert leftovers(work) == [".s.state.lock"] or leftovers(work) == []
    assert taken() == undisturbed


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL, as other systems have it")
def test_a_disk_that_is_full_again_and_again(work: Path, undisturbed: Left) -> None:
    """A limit on the size of files fails a write as a full disk does, in its middle."""
    size = len(undisturbed[0])
    for room in (200, 20_000, size // 4, size // 2, size * 3 // 4, 10**9):
        process = subprocess.run(
            [sys.executable, *STRICT, "-c", LIMITED, str(room), *STREAM, *MODEL],
            cwd=work,
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
        )
        assert "Traceback" not in process.stderr, process.stderr
        if process.returncode == 0:
            break
        assert process.returncode == 1, process.stderr
    assert process.returncode == 0, process.stderr
    assert taken() == undisturbed
