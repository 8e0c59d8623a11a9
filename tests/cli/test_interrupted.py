"""Commands that are stopped or killed: nothing half-written, and what was kept is said."""

import importlib
import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from .conftest import MODEL, Run, StopWhen, leftovers, pictures, start

SLOW = ("--model", "tiny_of_tests:slow", *MODEL[2:])
STREAM = (
    "stream",
    "target",
    "--answers",
    "s.csv",
    "--state",
    "s.state",
    "--state-every",
    "2",
    "--batch-size",
    "3",
    "--lr",
    "0.01",
)


def wait_for_calls(process: "subprocess.Popen[str]", work: Path, calls: int) -> None:
    """Wait until the network was called so often."""
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        if (work / "calls").exists() and (work / "calls").stat().st_size >= calls:
            return
        time.sleep(0.01)
    raise AssertionError(process.communicate())


def stop(process: "subprocess.Popen[str]", number: int) -> tuple[int, str]:
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    return process.returncode, err


@pytest.mark.slow
@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_commands_leave_nothing_and_say_so(work: Path, number: int, exit_code: int) -> None:
    for words, calls, kept in (
        (
            ("adapt", "target", *SLOW, "--out", "b.safetensors", "--checkpoint", "b.run"),
            20,  # after the first epoch
            "b.run holds the run so far",
        ),
        (("predict", "target", *SLOW, "--out", "a.csv", "--batch-size", "1"), 9, "answers appear whole or not at all"),
    ):
        (work / "calls").unlink(missing_ok=True)
        process = start(work, *words)
        wait_for_calls(process, work, calls)
        code, err = stop(process, number)
        assert (code, kept in err, "Traceback" in err) == (exit_code, True, False), err
    assert not any((work / name).exists() for name in ("b.safetensors", "b.history.json", "a.csv"))
    assert (work / "b.run").exists()
    assert leftovers(work) == []


@pytest.mark.slow
def test_what_a_killed_prediction_left_goes_with_the_next_one(run: Run, work: Path) -> None:
    words = ("predict", "target", "--out", "a.csv", "--batch-size", "1")
    killed, alive = start(work, *words, *SLOW), None
    try:
        wait_for_calls(killed, work, 9)
        stop(killed, signal.SIGKILL)
        assert len(leftovers(work)) == 1
        (work / "calls").unlink()
        alive = start(work, *words, *SLOW)
        wait_for_calls(alive, work, 9)
        (left,) = leftovers(work)  # the killed one's is gone
        found = run(*words, *MODEL)
        assert (found.code, leftovers(work)) == (0, [left]), found.err  # and this one's is not
        alive.communicate(timeout=60)
        assert (alive.returncode, leftovers(work)) == (0, [])
    finally:
        for process in filter(None, (killed, alive)):
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGINT, signal.SIGKILL))],
)
def test_a_stopped_stream_goes_on_without_losing_or_repeating_a_line(run: Run, work: Path, number: int) -> None:
    path = next(Path("target").rglob("04.png"))
    path.write_bytes(path.read_bytes()[:20])  # a damaged image moves no batch
    whole = run(*STREAM, *MODEL, "--out", "whole.safetensors")  # the same weights, in less time
    assert whole.code == 0, whole.err
    wanted, domain = Path("s.csv").read_bytes(), Path("whole.safetensors").read_bytes()
    for name in ("s.csv", "s.state"):
        Path(name).unlink()
    process = start(work, *STREAM, *SLOW, "--out", "part.safetensors")
    wait_for_calls(process, work, 12)
    code, err = stop(process, number)
    if number != signal.SIGKILL:
        assert (code, "the same command goes on" in err) == (128 + number, True), err
    part = Path("s.csv").read_bytes()
    assert part.endswith(b"\n")
    assert wanted.startswith(part)
    assert 1 < part.count(b"\n") < wanted.count(b"\n")
    with Path("s.csv").open("ab") as file:
        file.write(b"half a li")  # as a power cut could leave it
    found = run(*STREAM, *MODEL, "--out", "part.safetensors", "--json")
    assert found.code == 0, found.err
    assert Path("s.csv").read_bytes() == wanted
    assert Path("part.safetensors").read_bytes() == domain
    assert found.json["report"]["images"] == 29
    assert any("04.png" in name for name in found.json["skipped"])


def test_a_state_belongs_to_its_stream_and_its_answers(run: Run) -> None:
    assert run(*STREAM, *MODEL).code == 0
    found = run(*STREAM, *MODEL, "--episodic")
    assert (found.code, "another stream (episodic False there, True here)" in found.err) == (1, True), found.err
    Path("s.csv").write_text("path,label\n")
    assert "is not what this stream wrote" in run(*STREAM, *MODEL).err
    Path("s.state").write_bytes(b"junk")
    assert "is not the state of a stream" in run(*STREAM, *MODEL).err
    assert run(*STREAM, *MODEL, "--force").code == 0
    Path("s.state").unlink()
    assert "s.csv is there already" in run(*STREAM, *MODEL).err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stream_is_stopped_with_all_its_processes(run: Run, work: Path, number: int) -> None:
    """As a terminal does at Ctrl-C, and systemd when a service ends."""
    np.save("many.npy", pictures(300, 2)[0].permute(0, 2, 3, 1).numpy())  # so many that others decode them
    words = ("stream", "many.npy", *STREAM[2:])
    process = start(work, *words, *SLOW)
    wait_for_calls(process, work, 20)
    os.killpg(process.pid, number)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, "the same command goes on" in err, "Traceback" in err) == (128 + number, True, False), (
        err
    )
    part = Path("s.csv").read_bytes()
    found = run(*words, *MODEL, "--json")
    assert (found.code, found.json["report"]["images"]) == (0, 300), found.err
    assert Path("s.csv").read_bytes().startswith(part)


@pytest.mark.slow
def test_what_is_ignored_stays_ignored_and_sigterm_ends_all_the_same(work: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a script starts what it puts into the background
    try:
        process = start(work, *STREAM, *SLOW)
    finally:
        signal.signal(signal.SIGINT, before)
    wait_for_calls(process, work, 6)
    process.send_signal(signal.SIGINT)
    wait_for_calls(process, work, 12)
    code, err = stop(process, signal.SIGTERM)
    assert (code, "the same command goes on" in err) == (143, True), err


def test_stream_answers_and_starts_from_a_domain_file(run: Run, adapted: Path) -> None:
    for answer in ("before", "after", "samples"):
        words = ("stream", "target", *MODEL, "--answers", f"{answer}.csv", "--answer", answer, "--domain", adapted)
        assert run(*words, "--episodic").code == 0
    texts = {Path(f"{answer}.csv").read_text() for answer in ("before", "after", "samples")}
    assert len(texts) == 3
    assert all(text.count("\n") == 31 for text in texts)


def test_adapt_goes_on_from_its_checkpoint(run: Run, stop_when: StopWhen) -> None:
    words = ("adapt", "target", *MODEL, "--epochs", "3", "--batch-size", "10")
    assert run(*words, "--out", "whole.safetensors").code == 0
    stop_when("c.run", "any", *words, "--out", "part.safetensors", "--checkpoint", "c.run")
    assert not Path("part.safetensors").exists()
    assert run(*words, "--out", "part.safetensors", "--checkpoint", "c.run").code == 0
    assert Path("part.safetensors").read_bytes() == Path("whole.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("safetensors.torch:save", ("export", *MODEL, "--domain", "b.safetensors", "--out", "o.safetensors")),
        ("matplotlib.figure:Figure.savefig", ("inspect", "b.safetensors", "--plot", "o.png")),
        ("torch.optim:SGD.step", ("train", "digits:optdigits", "--out", "o.safetensors", "--quiet")),
        ("undrift.images.corrupt.sheet:corrupt", ("corrupt", "source/red/00.png", "--sheet", "o.png")),
    ],
)
def test_ctrl_c_in_the_other_commands(
    run: Run, work: Path, adapted: Path, monkeypatch: pytest.MonkeyPatch, where: str, words: tuple[str, ...]
) -> None:
    def pressed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    module, _, name = where.partition(":")
    *holder, attribute = name.split(".")  # by module object: the package has functions of the modules' names
    place = importlib.import_module(module)
    monkeypatch.setattr(getattr(place, holder[0]) if holder else place, attribute, pressed)
    before = sorted(p.name for p in work.iterdir())
    found = run(*words)
    assert (found.code, "stopped: " in found.err) == (130, True), found.err
    assert sorted(p.name for p in work.iterdir()) == before


def test_ctrl_c_in_an_evaluation(stop_when: StopWhen) -> None:
    found = stop_when("names.txt", "any", "evaluate", "--target", "target", *MODEL, "--out", "o.json")
    assert ("stopped: " in found.err, Path("o.json").exists()) == (True, False), found.err
