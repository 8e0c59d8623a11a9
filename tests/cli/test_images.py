"""Images that a command does not get as it should: broken to the last, of another size, lost with who decodes them."""

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from undrift.stream import Stream

from .conftest import MODEL, Run, pictures, start

STREAM = ("stream", "target", *MODEL, "--batch-size", "5", "--state-every", "1")


def test_a_stream_goes_on_where_all_that_is_left_is_broken(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = sorted(Path("target").rglob("*.png"))[10:]
    for path in broken:
        path.write_bytes(b"no image")
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


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's list of a process's children")
def test_a_killed_decoding_process_is_said_in_json(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save("many.npy", pictures(300, 3)[0].permute(0, 2, 3, 1).numpy())
    monkeypatch.setenv("UNDRIFT_WORKERS", "1")
    words = ("stream", "many.npy", "--model", "tiny_of_tests:slow", *MODEL[2:], "--answers", "o.csv")
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
