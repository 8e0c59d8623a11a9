"""Images that a command does not get as it should: broken to the last, of another size, lost with who decodes them."""

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from faults import environment
from undrift import Stream

from .conftest import MODEL, Run, pictures, start

STREAM = ("stream", "target", *MODEL, "--batch-size", "5", "--state-every", "1")


def test_a_stream_goes_on_where_all_that_is_left_is_broken(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = sorted(Path("target").rglob("*.png"))[10:]
    for path in broken:
        path.write_bytes(b"no image")
        os.utime(path, (0, 0))  # long ago: nobody is writing it any more
    assert run(*STREAM, "--answers", "whole.csv").code == 0

    following, batches = Stream.__next__, []

    def stopped(self: Stream) -> object:
        batches.append(1)
        if len(batches) > 2:
            raise KeyboardInterrupt
        return following(self)

    words = (*STREAM, "--answers", "part.csv", "--state", "part.state", "--out", "part.safetensors", "--json")
    with monkeypatch.context() as patched:
        patched.setattr(Stream, "__next__", stopped)
        assert run(*words).code == 130
    found = run(*words)
    assert found.code == 0, found.err
    assert Path("part.csv").read_bytes() == Path("whole.csv").read_bytes()
    assert sorted(found.json["skipped"]) == [str(path) for path in broken]
    assert Path("part.safetensors").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("stream", "--answers", "o.csv", "--batch-size", "5"),
        ("predict", "--out", "o.csv", "--batch-size", "5"),
        ("adapt", "--out", "o.safetensors", "--epochs", "1"),
    ],
)
def test_an_image_of_another_size_is_named_with_what_to_do(run: Run, words: tuple[str, ...]) -> None:
    odd = sorted(Path("target").rglob("*.png"))[12]
    Image.new("RGB", (20, 10)).save(odd)
    command, *rest = words
    found = run(command, "target", *MODEL, *rest)
    assert found.code == 1
    assert f"{odd} has 10×20 pixels" in found.err
    assert "is 8×8; needed: one size" in found.err
    assert "--resize 8x8" in found.err
    assert "--crop" not in found.err
    assert run(command, "target", *MODEL, *rest, "--resize", "8x8", "--force").code == 0


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's list of a process's children")
def test_a_killed_decoding_process_is_said_in_json(work: Path) -> None:
    np.save("many.npy", pictures(300, 3)[0].permute(0, 2, 3, 1).numpy())
    words = ("stream", "many.npy", "--model", "tiny_of_tests:slow", *MODEL[2:], "--answers", "o.csv")
    with environment(UNDRIFT_WORKERS="1"):
        process = start(work, *words, "--batch-size", "2", "--json")
    answers, end = work / "o.csv", time.monotonic() + 60
    while time.monotonic() < end and not (answers.exists() and answers.read_bytes().count(b"\n") > 4):
        time.sleep(0.02)
    (worker,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(worker), signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, "Traceback" in err) == (1, False), err
    found = json.loads(out)
    assert found["error"] == "DataError"
    assert "was lost to SIGKILL; needed: memory" in found["message"]
    assert "UNDRIFT_WORKERS" in found["message"]


def test_an_image_that_is_still_being_written_is_left_for_the_next_run(run: Run) -> None:
    files = sorted(Path("target").rglob("*.png"))
    late, whole = files[-2:], [path.read_bytes() for path in files[-2:]]
    half, lost = files[3], files[-3]
    for path in (half, lost, *late):
        path.write_bytes(path.read_bytes()[:40])
    os.utime(lost, (0, 0))
    words = (*STREAM, "--answers", "a.csv", "--state", "a.state", "--json")
    found = run(*words)
    assert found.code == 0, found.err
    assert found.json["unfinished"] == [str(path) for path in late]
    said = f"left for the next run, as it was written to just now and cannot be read yet: {late[0]} and 1 after it"
    assert said in found.err
    # In the middle of the others it cannot wait, and what nobody writes any more is damaged.
    assert sorted(found.json["skipped"]) == [str(half), str(lost)]
    assert Path("a.csv").read_text().count("\n") == 27
    late[0].write_bytes(whole[0])
    found = run(*words)
    assert "after 28 of 30 images" in found.err
    assert (found.json["unfinished"], len(found.json["skipped"])) == ([str(late[1])], 2)
    late[1].write_bytes(whole[1])
    os.utime(late[1], (0, 0))
    found = run(*words)
    assert (found.json["unfinished"], sorted(found.json["skipped"])) == ([], [str(half), str(lost)])
    assert [line.split(",")[0] for line in Path("a.csv").read_text().splitlines()[-2:]] == [str(path) for path in late]


def test_an_unreadable_image_is_damaged_where_it_cannot_wait(run: Run) -> None:
    last = sorted(Path("target").rglob("*.png"))[-1]
    last.write_bytes(b"no image")
    found = run(*STREAM, "--answers", "a.csv", "--json").json  # no state: no next run
    assert (found["unfinished"], list(found["skipped"])) == ([], [str(last)])
    ahead = time.time() + 10**6
    os.utime(last, (ahead, ahead))
    found = run(*STREAM, "--answers", "b.csv", "--state", "b.state", "--json").json
    assert (found["unfinished"], list(found["skipped"])) == ([], [str(last)])
