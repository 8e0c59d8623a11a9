"""Commands that several processes run: adapt together, predict in parts; one message, and no image lost or twice."""

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from faults import environment
from undrift.cli.answer_parts import AnswerParts

from .conftest import MODEL, Run, leftovers, start
from .test_interrupted import SLOW, stop, wait_for_calls

PREDICT = ("predict", "target", "--out", "a.csv", "--batch-size", "2", "--samples", "2")


def torchrun(work: Path, count: int, *words: str) -> "subprocess.CompletedProcess[str]":
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count), "-m", "undrift"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *launch, *words],
        cwd=work,
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )


# Parts --------------------------------------------------------------------------------------------------------------


def names(path: str | Path) -> list[str]:
    with Path(path).open(newline="") as file:
        return [row[0] for row in csv.reader(file)][1:]


@pytest.mark.parametrize("parts", ["1", "4", "40"])
def test_parts_give_the_answers_of_one_command(run: Run, adapted: Path, parts: str) -> None:
    """Draws of the noise included, whatever the number of parts, with unreadable images among them."""
    Path("target", "red", "00.png").write_bytes(b"no image")
    words = ("target", *MODEL, "--domain", adapted, "--batch-size", "4", "--samples", "2")
    whole = run("predict", *words, "--out", "whole.csv", "--json")
    found = run("predict", *words, "--out", "a.csv", "--parts", parts, "--json")
    assert (whole.code, found.code) == (0, 0), found.err
    assert Path("a.csv").read_bytes() == Path("whole.csv").read_bytes()
    for name in ("answered", "abstained", "unanswered", "skipped"):
        assert found.json[name] == whole.json[name], name
    assert sorted(path.name for path in Path("a.csv.parts").iterdir()) == ["joined", "run.json"]


def test_parts_make_a_parquet_file(run: Run, work: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    for name, more in (("whole.parquet", ()), ("a.parquet", ("--parts", "3"))):
        assert run("predict", "target", *MODEL, "--out", name, "--batch-size", "4", *more).code == 0
    assert parquet.read_table("a.parquet").equals(parquet.read_table("whole.parquet"))


def test_parts_that_are_finished_are_not_answered_again(run: Run, work: Path) -> None:
    """A process that comes late finds all done; one with another question is refused."""
    assert run(*PREDICT, *SLOW, "--parts", "3").code == 0
    calls = (work / "calls").stat().st_size
    late = run(*PREDICT, *SLOW, "--parts", "3", "--json")
    assert (late.code, late.json["answered"]) == (0, 30)
    assert (work / "calls").stat().st_size <= calls + 1  # the look at two images before anything is answered
    assert "all parts were answered before" in late.err
    Path("other.txt").write_text("r\ng\nb\n")
    for words, name in ((("--abstain-below", "0.5"), "abstain_below"), (("--classes", "other.txt"), "classes")):
        other = run(*PREDICT, *SLOW, "--parts", "3", *words)
        assert other.code == 1
        assert f"they differ in {name}" in other.err
    Path("a.csv").unlink()
    assert "Delete the folder to answer again" in run(*PREDICT, *SLOW, "--parts", "3").err


def test_parts_replace_no_file_of_somebody_else(run: Run, work: Path) -> None:
    Path("a.csv").write_text("my notes")
    found = run(*PREDICT, *MODEL, "--parts", "3")
    assert (found.code, "a.csv exists, and was not answered in parts" in found.err) == (1, True), found.err
    assert Path("a.csv").read_text() == "my notes"
    assert not Path("a.csv.parts").exists()


@pytest.mark.parametrize("change", [lambda rows: rows[:-1], lambda rows: [*rows, rows[-1]]])
def test_a_part_that_lost_or_doubled_an_image_is_not_joined(work: Path, change: object) -> None:
    assert callable(change)
    parts = AnswerParts(work / "a.csv", 2, ["a", "b", "c", "d"], 1, {})
    parts.open()
    for number, rows in enumerate((["a", "b"], ["c", "d"])):
        lines = ["path,label", *(f"{name},1" for name in (change(rows) if number else rows))]
        parts.file(number).write_text("\n".join(lines) + "\n")
        parts.close(number, {"answered": 2}, {})
    with pytest.raises(Exception, match="part 2, each once"):
        parts.join()
    assert not (work / "a.csv").exists()


@pytest.mark.parametrize(
    ("words", "found"),
    [(("--force",), "--force"), (("--mode", "fast"), "--mode fast"), (("--out", ""), "")],
)
def test_parts_that_cannot_be_shared_are_refused(run: Run, words: tuple[str, ...], found: str) -> None:
    given = PREDICT if words[0] != "--out" else ("predict", "target")
    ended = run(*given, *(words if found else ()), *MODEL, "--parts", "2")
    assert ended.code == 2
    assert (found or "no --out") in ended.err


@pytest.mark.slow
@pytest.mark.parametrize("held", [False, True])
def test_a_killed_process_loses_no_image_and_doubles_none(run: Run, work: Path, held: bool) -> None:
    """Two processes work; one is killed in the middle of a part, the other takes that part too."""
    assert run(*PREDICT[:3], "whole.csv", *PREDICT[4:], *MODEL).code == 0
    words = (*PREDICT, *SLOW, "--parts", "5")
    killed = start(work, *words)
    wait_for_calls(killed, work, 9)
    other = start(work, *words)
    if held:  # the other finds everything else done, and waits for what the first holds
        killed.send_signal(signal.SIGSTOP)
        with pytest.raises(subprocess.TimeoutExpired):
            other.communicate(timeout=8)
        assert not Path("a.csv").exists()
    else:
        wait_for_calls(other, work, 16)
    assert stop(killed, signal.SIGKILL)[0] == -signal.SIGKILL
    _, err = other.communicate(timeout=120)
    assert other.returncode == 0, err
    assert names("a.csv") == names("whole.csv")
    assert len(set(names("a.csv"))) == 30
    assert Path("a.csv").read_bytes() == Path("whole.csv").read_bytes()
    assert leftovers(work) == []


# torchrun -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_torchrun_adapts_as_one_process_does(run: Run, work: Path) -> None:
    words = ("adapt", "target", *MODEL, "--epochs", "2", "--batch-size", "8", "--pack-mean", "exact")
    assert run(*words, "--out", "one.safetensors").code == 0
    found = torchrun(work, 2, *words, "--out", "two.safetensors", "--checkpoint", "two.run", "--json")
    assert found.returncode == 0, found.stderr
    result = json.loads(found.stdout)
    assert result["wrote"] == ["two.safetensors", "two.history.json"]
    assert "2 processes, " in found.stderr
    assert found.stderr.count("epoch 2 kept") == 1
    one, two = (load_file(work / f"{name}.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name].double(), value.double(), rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("adapt", "nowhere", "--out", "b.safetensors"), 1, "there is no nowhere"),
        (("stream", "target", "--answers", "s.csv"), 2, "torchrun started 2 processes of undrift stream"),
        (("predict", "target", "--out", "a.csv"), 2, "--parts N, of which each takes the next"),
        (("adapt", "target", "--out", "b.safetensors", "--method", "hcl"), 2, "uses more of a step"),
    ],
)
def test_an_error_of_many_processes_is_printed_once(work: Path, words: tuple[str, ...], code: int, told: str) -> None:
    found = torchrun(work, 2, *words, *MODEL)
    assert found.returncode == 1
    assert found.stderr.count(told) == 1
    assert f"exitcode  : {code} " in found.stderr
    assert "of 2: " in found.stderr
    assert leftovers(work) == []


FAILING = """
import os
import signal
from tiny_of_tests import Tiny

class Failing(Tiny):
    "Fails in the second process alone, while the first waits for it."
    passes = 0

    def forward(self, x):
        self.passes += 1
        if os.environ.get("RANK") == "1" and self.passes == 32:
            if os.environ["FAILS"] == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise MemoryError("no room")
        return super().forward(x)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fails", "told"),
    [
        ("alone", "OutOfMemory: process 1 of 2: no room"),
        ("killed", "ProcessLost: process 0 of 2: another process of this run is gone"),
    ],
)
def test_a_process_that_fails_alone_says_so_once(work: Path, fails: str, told: str) -> None:
    (work / "failing.py").write_text(FAILING)
    words = ("adapt", "target", "--out", "b.safetensors", "--epochs", "4", "--batch-size", "8", "--checkpoint", "b.run")
    with environment(FAILS=fails):
        found = torchrun(work, 2, *words, "--model", "failing:Failing", *MODEL[2:])
    assert found.returncode == 1
    assert found.stderr.count(told) == 1
    assert found.stderr.count("of 2: ") == 1
    assert (Path("b.run").exists(), Path("b.safetensors").exists()) == (True, False)
    assert leftovers(work) == []


@pytest.mark.slow
def test_torchrun_predicts_in_parts(run: Run, work: Path) -> None:
    assert run(*PREDICT[:3], "whole.csv", *PREDICT[4:], *MODEL).code == 0
    found = torchrun(work, 3, *PREDICT, *MODEL, "--parts", "6")
    assert found.returncode == 0, found.stderr
    assert Path("a.csv").read_bytes() == Path("whole.csv").read_bytes()
