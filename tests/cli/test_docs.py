"""The examples of docs/reference/cli.md run, one after another, in one folder."""

import functools
import re
import shlex
from pathlib import Path

import pytest

from undrift.cli import main
from undrift_bench import data

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"
COMMANDS = re.findall(r"^\| \[`(\w+)`\]", PAGE.read_text(), re.M)
ELSEWHERE = ("COMMAND", "--root")
"""Examples with a word to fill in, or on data that only a benchmark has."""


@pytest.mark.slow
def test_the_examples_run(inside: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    digits = data.digits
    few = functools.cache(lambda name: digits(name).select(range(120)))  # seconds, not a minute
    monkeypatch.setattr(data, "digits", few)
    lines = re.findall(r"^    undrift (.+)$", PAGE.read_text(), re.M)
    ran = set()
    for line in lines:
        words = shlex.split(line)
        if not set(words) & set(ELSEWHERE):
            assert main([*words, "--quiet"]) == 0, (line, capsys.readouterr().err)
            ran.add(words[0])
    assert ran == set(COMMANDS) - {"corrupt"}  # its examples need data sets
    assert Path("answers.csv").read_text().count("\n") == 121


def test_every_command_is_on_the_page_and_helps(capsys: pytest.CaptureFixture[str]) -> None:
    page = PAGE.read_text()
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert re.findall(r"^│ (\w+)  ", text, re.M) == sorted(COMMANDS, key=text.index)
    assert "130 Ctrl-C" in " ".join(text.split())
    for name in COMMANDS:
        assert f"## {name}\n" in page
        for flag in ("--help", "--help-all"):
            assert main([name, flag]) == 0
            text = capsys.readouterr().out
            assert "Example: undrift" in text or name == "bench"
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("undrift ")
    assert main([]) == 2
