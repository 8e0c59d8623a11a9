"""What is printed may be read by nobody, or not be printable: no file is missing for it."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from undrift.cli import main

from .conftest import MODEL, STRICT, Run

WRITING = (
    (
        ("adapt", "target", *MODEL, "--epochs", "1", "--out", "o.safetensors", "--plot"),
        ("o.safetensors", "o.history.json", "o.history.png"),
    ),
    (("stream", "target", *MODEL, "--answers", "o.csv", "--out", "o.safetensors"), ("o.csv", "o.safetensors")),
    (("evaluate", "--target", "target", *MODEL, "--out", "o.json", "--plot", "o.png"), ("o.json", "o.png")),
    (("inspect", "b.safetensors", "--plot", "o.png"), ("o.png",)),
    (("export", *MODEL, "--domain", "b.safetensors", "--out", "o.safetensors"), ("o.safetensors",)),
)


@pytest.fixture
def unread() -> Iterator[io.TextIOWrapper]:
    """Return a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", encoding="utf-8") as file:
        yield file


@pytest.mark.parametrize(("words", "files"), WRITING)
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_pipe_that_nobody_reads_costs_no_file(
    adapted: Path,
    unread: io.TextIOWrapper,
    stream: str,
    words: tuple[str, ...],
    files: tuple[str, ...],
) -> None:
    warned = "export" in words  # of its statistics; the others have nothing to say on stderr
    with redirect_stdout(unread) if stream == "stdout" else redirect_stderr(unread):
        assert main(words) == (1 if stream == "stdout" or warned else 0)
    assert [name for name in files if not Path(name).exists()] == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(("words", "files"), WRITING)
def test_files_are_written_before_the_first_line(
    adapted: Path,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    files: tuple[str, ...],
) -> None:
    full = Path("/dev/full").open("w")  # noqa: SIM115  # closed below
    with redirect_stdout(full):
        assert main(words) == 1
    assert [name for name in files if not Path(name).exists()] == []
    full.close()  # as Python does at its end: what it could not take is not tried again
    err = capsys.readouterr().err
    assert err.count("could not be written (No space left on device)") == 1


def test_json_comes_out_where_nobody_reads_the_warnings(run: Run, adapted: Path, unread: io.TextIOWrapper) -> None:
    with redirect_stderr(unread):
        found = run("export", *MODEL, "--domain", adapted, "--out", "o.safetensors", "--json")
    assert (found.code, found.json["wrote"], len(found.json["warnings"])) == (1, ["o.safetensors"], 1)


@pytest.mark.parametrize("words", [("predict", "target", *MODEL), ("inspect", "b.safetensors", "--json")])
def test_answers_that_nobody_reads_end_quietly(adapted: Path, unread: io.TextIOWrapper, words: tuple[str, ...]) -> None:
    with redirect_stdout(unread):
        assert main(words) == 1
    unread.flush()  # as Python does at its end: goes nowhere, and raises nothing


SLOW = ("--model", "tiny_of_tests:slow", *MODEL[2:])
ON_A_TERMINAL = (
    (("adapt", "target", *SLOW, "--epochs", "2", "--out", "o.safetensors"), ("o.safetensors", "o.history.json")),
    (("predict", "target", *SLOW, "--batch-size", "1", "--out", "o.csv"), ("o.csv",)),
    (
        ("stream", "target", *SLOW, "--batch-size", "2", "--answers", "o.csv", "--out", "o.safetensors"),
        ("o.csv", "o.safetensors"),
    ),
)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs pseudo-terminals")
@pytest.mark.parametrize(("words", "files"), ON_A_TERMINAL)
def test_a_terminal_that_is_closed_costs_no_file(work: Path, words: tuple[str, ...], files: tuple[str, ...]) -> None:
    ours, theirs = os.openpty()
    code = "import sys; from undrift.cli import main; sys.exit(main())"
    process = subprocess.Popen(
        [sys.executable, *STRICT, "-c", code, *words],
        cwd=work,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm"},
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    seen = b""
    while b"%" not in seen:  # its bar
        seen += os.read(ours, 65536)
    os.close(ours)
    assert process.poll() is None
    assert process.wait(60) == 1, seen
    assert [name for name in files if not (work / name).exists()] == []


def shell(work: Path, *words: str) -> "subprocess.CompletedProcess[bytes]":
    """Run a command as a terminal that knows Latin-1 only would."""
    code = "import sys; from undrift.cli import main; sys.exit(main())"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "latin-1"}
    return subprocess.run(
        [sys.executable, *STRICT, "-c", code, *words], cwd=work, env=environment, capture_output=True, check=False
    )


@pytest.mark.slow
def test_a_terminal_without_arrows(work: Path) -> None:
    words = ("adapt", "target", *MODEL, "--epochs", "1", "--likelihood", "information", "--out", "o.safetensors")
    found = shell(work, *words)
    assert (found.returncode, found.stderr) == (0, b"")
    assert b"entropy 0." in found.stdout
    assert b" ? " in found.stdout  # where the arrow was
    assert Path("o.history.json").exists()


@pytest.mark.slow
def test_json_keeps_names_that_the_terminal_does_not_have(work: Path) -> None:
    next(Path("target/red").iterdir()).rename("target/red/Ω.png")
    found = shell(work, "predict", "target/red/Ω.png", *MODEL, "--json")
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["answers"][0]["path"] == "target/red/Ω.png"
