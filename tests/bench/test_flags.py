"""Flags of `undrift bench` that exclude one another are refused with three facts, and nothing is written."""

import json
from itertools import combinations
from pathlib import Path

import pytest

from undrift.bench import NAMES
from undrift.cli import main

INSTEAD = ("--list", "--tables", "--times")
TOGETHER = [flags for count in (2, 3) for flags in combinations(INSTEAD, count)]
CELLS = ["bench", "online-imagenet", "--tiny", "--only", "source", "--seeds", "1", "--device", "cpu", "--quiet"]


@pytest.mark.parametrize("name", [["online-imagenet", "--tiny"], ["table1"], []], ids=["cells", "no cells", "no name"])
@pytest.mark.parametrize("flags", TOGETHER, ids=" ".join)
def test_flags_that_exclude_one_another_are_refused(
    flags: tuple[str, ...], name: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for order in (flags, flags[::-1]):
        assert main(["bench", *name, "--results", str(tmp_path), "--json", *order]) == 2
        found = json.loads(capsys.readouterr().out)
        assert found["error"] == "OptionError"
        what, _, rest = found["message"].partition("; needed: ")
        assert [flag for flag in INSTEAD if flag in what] == list(flags)
        assert rest.startswith("at most one of --list, --tables, --times")
        assert "Give them in a command each" in rest
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flag", ["--tables", "--times"])
def test_a_flag_without_its_benchmark_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", flag, "--json"]) == 2
    message = json.loads(capsys.readouterr().out)["message"]
    assert f"{flag} was given and no benchmark; needed: the name of one. Write `undrift bench NAME {flag}`" in message


def test_a_list_without_a_benchmark_is_of_the_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["benchmarks"]) == set(NAMES)


@pytest.mark.parametrize("flag", INSTEAD)
def test_each_alone_does_its_own_and_runs_no_cell(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*CELLS, "--results", str(tmp_path), "--json", flag]) == 0
    found = json.loads(capsys.readouterr().out)
    counted = {"--list": "cells", "--tables": "ran", "--times": "timed"}
    assert [word for word in counted.values() if word in found] == [counted[flag]]
    assert found.get("left", 1) == 1  # the one cell is still to be run
    assert bool(found.get("wrote")) == (flag != "--list")  # so the advice holds: times write the tables, too
