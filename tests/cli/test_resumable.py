"""A stream's files: whose they are, what --force does to them, and how a stream goes on as images arrive."""

import errno
import os
import shutil
import signal
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from faults import full_disk

from .conftest import MODEL, Run, StopWhen, leftovers, start, write_tree
from .test_interrupted import SLOW, STREAM, stop, wait_for_calls

OUT = ("--out", "o.safetensors")
HEADER = b"path,label,probability,entropy,mutual_information\n"


Begin = Callable[..., bytes]


@pytest.fixture
def begin(stop_when: StopWhen) -> Begin:
    """Return what begins a stream, ends it in the fifth batch, and returns the answers that its state knows."""

    def call(*words: str) -> bytes:
        stop_when("s.csv", 13, *STREAM, *MODEL, *words)
        part = Path("s.csv").read_bytes()[: torch.load("s.state", weights_only=True)["offset"]]
        assert part.count(b"\n") == 13
        return part

    return call


@pytest.mark.slow
def test_two_processes_do_not_share_a_file(run: Run, work: Path) -> None:
    process = start(work, *STREAM, *SLOW)
    wait_for_calls(process, work, 6)
    process.send_signal(signal.SIGSTOP)  # it waits for us
    for words, name in (
        (STREAM, "s.state"),
        ((*STREAM, "--force"), "s.state"),
        ((*STREAM, "--answers", "t.csv", "--force"), "s.state"),
        ((*STREAM, "--state", "t.state", "--force"), "s.csv"),
    ):
        found = run(*words, *MODEL)
        told = f"another process is writing {name}; needed: one process per file" in found.err
        assert (found.code, told) == (1, True), found
    process.send_signal(signal.SIGCONT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    answers = Path("s.csv").read_bytes()
    assert answers.count(b"\n") == 31
    assert not Path("t.state").exists()
    assert leftovers(work) == []
    for name in ("s.csv", "s.state"):
        Path(name).unlink()
    assert run(*STREAM, *MODEL).code == 0
    assert Path("s.csv").read_bytes() == answers


@pytest.mark.parametrize("again", [(), ("--force",)])
def test_a_stopped_stream_goes_on_whatever_force_says(run: Run, begin: Begin, again: tuple[str, ...]) -> None:
    assert run(*STREAM, *MODEL, *OUT).code == 0
    wanted, domain = Path("s.csv").read_bytes(), Path("o.safetensors").read_bytes()
    Path("s.state").unlink()
    Path("o.safetensors").write_bytes(b"old")
    begin(*OUT, "--force")  # the state is gone: all starts over
    assert Path("o.safetensors").read_bytes() == b"old"
    found = run(*STREAM, *MODEL, *OUT, *again, "--json")
    assert found.code == 0, found.err
    assert "going on from s.state, after 12 of 30 images" in found.err
    assert ("to start over, remove s.state" in found.err) == bool(again)
    assert (Path("s.csv").read_bytes(), Path("o.safetensors").read_bytes()) == (wanted, domain)


def test_a_stream_that_ended_is_not_begun_again_by_force(run: Run) -> None:
    assert run(*STREAM, *MODEL, *OUT).code == 0
    wanted = Path("s.csv").read_bytes()
    for words in ((), ("--force",)):
        found = run(*STREAM, *MODEL, *OUT, *words)
        assert (found.code, "after 30 of 30 images" in found.err) == (0, True), found.err
        assert Path("s.csv").read_bytes() == wanted
    Path("s.state").unlink()
    found = run(*STREAM, *MODEL)
    assert (found.code, "s.csv is there already" in found.err, "lose what it holds" in found.err) == (1, True, True)
    found = run(*STREAM, *MODEL, *OUT, "--force")
    assert (found.code, "going on" in found.err) == (0, False)


def test_force_replaces_a_domain_file_and_the_stream_goes_on(run: Run, begin: Begin) -> None:
    part = begin()
    Path("o.safetensors").write_bytes(b"old")
    found = run(*STREAM, *MODEL, *OUT)
    assert (found.code, "o.safetensors is there already" in found.err) == (1, True), found.err
    found = run(*STREAM, *MODEL, *OUT, "--force")
    assert (found.code, "going on from s.state" in found.err) == (0, True), found.err
    assert Path("s.csv").read_bytes().startswith(part)
    assert Path("o.safetensors").read_bytes() != b"old"


def test_force_replaces_what_is_another_streams_and_says_so(run: Run) -> None:
    noisy = (*MODEL, "--method", "vmp")  # whose answers depend on the seed from the first image on
    assert run(*STREAM, *noisy).code == 0
    before = Path("s.csv").read_bytes()
    found = run(*STREAM, *noisy, "--seed", "1")
    assert (found.code, "deletes it and the answers in s.csv" in found.err) == (1, True), found.err
    assert Path("s.csv").read_bytes() == before
    found = run(*STREAM, *noisy, "--seed", "1", "--force")
    assert found.code == 0, found.err
    assert "another stream (seed 0 there, 1 here): --force replaces it, and the answers in s.csv" in found.err
    assert Path("s.csv").read_bytes() != before
    Path("s.state").write_bytes(b"junk")
    found = run(*STREAM, *noisy, "--json")
    assert (found.code, found.json["error"]) == (1, "DataError")
    assert "not the state of a stream" in found.err
    assert "which deletes it and the answers in s.csv" in found.err


def test_a_state_that_cannot_be_read_is_not_replaced(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(*STREAM, *MODEL).code == 0
    before, read = Path("s.csv").read_bytes(), Path.read_bytes

    def failing(path: Path) -> bytes:
        if path.name == "s.state":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return read(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", failing)
        found = run(*STREAM, *MODEL, "--force")
    assert (found.code, "s.state cannot be read (Permission denied)" in found.err) == (1, True), found.err
    assert Path("s.csv").read_bytes() == before


def test_a_stream_goes_on_as_images_arrive(run: Run) -> None:
    assert run(*STREAM, *MODEL, *OUT).code == 0
    before = Path("s.csv").read_bytes()
    write_tree(Path("more"), 6, 3)
    for number, path in enumerate(sorted(Path("more").rglob("*.png"))):
        path.rename(f"target/red/z{number}.png")  # the folder red is the last one
    found = run(*STREAM, *MODEL, *OUT, "--json")
    assert (found.code, "after 30 of 36 images" in found.err) == (0, True), found.err
    assert found.json["report"]["images"] == 36
    after = Path("s.csv").read_bytes()
    assert after.startswith(before)
    assert after[len(before) :].count(b"target/red/z") == 6
    assert run(*STREAM, *MODEL, *OUT).code == 0
    assert Path("s.csv").read_bytes() == after


def test_other_images_are_named(run: Run) -> None:
    assert run(*STREAM, *MODEL).code == 0
    before = Path("s.csv").read_bytes()
    path = Path("target/green/04.png")
    path.rename("target/green/05.png")
    wanted = "other names from image 12 on, target/green/04.png there, target/green/05.png here"
    assert wanted in run(*STREAM, *MODEL).err
    Path("target/green/05.png").rename(path)
    Path("target/blue/00b.png").write_bytes(path.read_bytes())
    assert "other names from image 1 on, target/blue/02.png there, target/blue/00b.png" in run(*STREAM, *MODEL).err
    Path("target/blue/00b.png").unlink()
    Path("target/red/27.png").unlink()
    assert "30 images were done there, 29 are here" in run(*STREAM, *MODEL).err
    shutil.copy("target/red/24.png", "target/red/27.png")
    assert run(*STREAM, *MODEL).code == 0
    assert Path("s.csv").read_bytes() == before


def test_what_differs_is_named_part_by_part(run: Run) -> None:
    assert run(*STREAM, *MODEL).code == 0
    found = run(*STREAM, *MODEL, "--resize", "8", "--crop", "8", "--kl-weight", "3")
    for part in (
        "preprocessing resize None there, 8 here",
        "preprocessing crop None there, 8 here",
        "options kl_weight 0.01 there, 3.0 here",
    ):
        assert part in found.err


def test_a_state_of_the_first_format_goes_on_with_the_same_images(run: Run, begin: Begin) -> None:
    assert run(*STREAM, *MODEL).code == 0
    wanted = Path("s.csv").read_bytes()
    for name in ("s.csv", "s.state"):
        Path(name).unlink()
    part = begin()
    found = torch.load("s.state", weights_only=True)
    names = sorted(str(path) for path in Path("target").rglob("*.png"))
    raw = "Preprocess(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), resize=None, crop=None, interpolation='bilinear')"
    found["identity"] |= {
        "number of images": 30,
        "names of images": zlib.crc32("\n".join(names).encode()),
        "preprocessing": raw,
    }
    kept = ("identity", "position", "offset", "checksum", "skipped", "stream")
    torch.save({"undrift": "undrift stream 1", **{name: found[name] for name in kept}}, "s.state")
    shutil.copy("target/red/27.png", "target/red/28.png")
    assert "number of images 30 there, 31 here" in run(*STREAM, *MODEL).err
    Path("target/red/28.png").unlink()
    assert "resize=None, crop=None" in run(*STREAM, *MODEL, "--resize", "8", "--crop", "8").err
    assert run(*STREAM, *MODEL).code == 0
    assert Path("s.csv").read_bytes() == wanted
    assert wanted.startswith(part)


def test_what_a_kill_left_beside_the_state_is_swept_up(run: Run, work: Path) -> None:
    for name in (".s.state.0123abcd.tmp", ".s.state.lock"):
        Path(name).write_bytes(b"half")
    Path(".s.state.mine.tmp").write_text("not undrift's")
    assert run(*STREAM, *MODEL).code == 0
    assert leftovers(work) == [".s.state.mine.tmp"]
    Path(".c.run.0123abcd.tmp").write_bytes(b"half")
    words = ("adapt", "target", *MODEL, "--out", "c.safetensors", "--epochs", "1", "--checkpoint", "c.run")
    assert run(*words).code == 0
    assert leftovers(work) == [".s.state.mine.tmp"]


def test_a_first_state_that_cannot_be_written_leaves_the_way_free(run: Run, work: Path) -> None:
    with full_disk(after=1):  # that is the answers' file
        found = run(*STREAM, *MODEL)
    assert (found.code, "on another disk, and run the same command again." in found.err) == (1, True), found.err
    assert not Path("s.csv").exists()
    assert leftovers(work) == []
    assert run(*STREAM, *MODEL).code == 0


def test_a_batch_that_fails_first_leaves_the_way_free(run: Run, stop_when: StopWhen) -> None:
    words = ("stream", "target", *MODEL, "--answers", "s.csv")
    found = stop_when("s.csv", 1, *words)
    assert ("Nothing was written" in found.err, Path("s.csv").exists()) == (True, False), found.err
    assert run(*words).code == 0


def test_a_resumed_stream_that_is_stopped_first_says_that_its_files_are_whole(
    run: Run, begin: Begin, stop_when: StopWhen
) -> None:
    begin()
    before = Path("s.csv").read_bytes(), Path("s.state").read_bytes()
    found = stop_when("names.txt", "any", *STREAM, *MODEL)  # in its first batch
    assert "Nothing new was written: s.csv and s.state are as they were" in found.err
    assert (Path("s.csv").read_bytes(), Path("s.state").read_bytes()) == before


@pytest.mark.slow
def test_two_runs_do_not_share_a_checkpoint(run: Run, work: Path) -> None:
    words = ("--out", "c.safetensors", "--checkpoint", "c.run")
    process = start(work, "adapt", "target", *SLOW, *words)
    wait_for_calls(process, work, 9)
    process.send_signal(signal.SIGSTOP)
    found = run("adapt", "target", *MODEL, *words)
    process.send_signal(signal.SIGCONT)
    assert (found.code, "another process is writing c.run" in found.err) == (1, True), found.err
    assert stop(process, signal.SIGTERM)[0] == 143
    assert leftovers(work) == []


@pytest.mark.parametrize("words", [(), ("--state", "s.state")])
@pytest.mark.parametrize("left", [0, 7, len(HEADER)])
def test_columns_without_an_answer_are_nobodys_work(run: Run, words: tuple[str, ...], left: int) -> None:
    command = ("stream", "target", *MODEL, "--answers", "s.csv", "--batch-size", "15", *words)
    Path("s.csv").write_bytes(HEADER[:left])
    Path("o.safetensors").write_bytes(b"mine")
    found = run(*command, *OUT)
    assert (found.code, "o.safetensors is there already" in found.err) == (1, True), found.err
    assert Path("s.csv").read_bytes() == HEADER[:left]
    found = run(*command)
    assert found.code == 0, found.err
    assert Path("s.csv").read_bytes().count(b"\n") == 31


@pytest.mark.parametrize("mine", [b"path,label,probability,entropy,mutual_information\n\n", b"path;", b"\n", b"Path"])
def test_anything_beyond_the_columns_is_somebodys_work(run: Run, mine: bytes) -> None:
    Path("s.csv").write_bytes(mine)
    found = run(*STREAM, *MODEL)
    assert (found.code, "s.csv is there already" in found.err) == (1, True), found.err
    assert Path("s.csv").read_bytes() == mine


@pytest.mark.slow
def test_a_stream_killed_before_its_first_state_starts_again(run: Run, work: Path) -> None:
    process = start(work, *STREAM, *SLOW)
    end = time.monotonic() + 60
    while not Path("s.csv").exists() and time.monotonic() < end:
        time.sleep(0.0005)
    process.kill()
    process.communicate(timeout=60)
    found = run(*STREAM, *MODEL)
    assert found.code == 0, found.err
    assert Path("s.csv").read_bytes().count(b"\n") == 31
