"""`undrift-bench`, a command of its own."""

import subprocess
import sys

import pytest

from undrift_bench.bench import NAMES
from undrift_bench.cli import main


@pytest.mark.parametrize("words", [[], ["list"], ["bench", "list"]])
def test_it_names_the_benchmarks(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(NAMES)


def test_it_has_help_and_refuses_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "undrift-bench COMMAND" in capsys.readouterr().out
    assert main(["nothing"]) != 0
    assert "there is no benchmark 'nothing'; needed: one of online-c10" in capsys.readouterr().err


@pytest.mark.slow
def test_it_is_a_program() -> None:
    done = subprocess.run([sys.executable, "-m", "undrift_bench", "list"], check=True, capture_output=True, text=True)
    assert "online-c10" in done.stdout
