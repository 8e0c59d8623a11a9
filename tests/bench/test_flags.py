"""What `undrift bench` would ignore it refuses with three facts; a list says what it does not show."""

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from undrift._errors import OptionError
from undrift.bench import NAMES, Request
from undrift.bench.request import EXTRA
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


def listed(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["bench", *words, "--seeds", "1", "--list", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_benchmark_that_reads_anothers_cells_lists_these(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--tiny", "--only", "shot", "--results", str(tmp_path)]
    found = listed(["generalized", *flags], capsys)
    assert set(found["cells"]) == {f"tiny.{task}.shot.n40.s0.float32" for task in ("photo-sketch", "sketch-photo")}
    assert found == listed(["offline", *flags], capsys)


@pytest.mark.parametrize("name", ["speed", "table1"])
def test_a_list_of_what_has_no_cells_says_so(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", name, "--list"]) == 2
    message = capsys.readouterr().err
    assert f"{name} has no cells to list; needed: a benchmark with cells. Leave --list out." in message


def test_a_list_says_how_many_are_finished_in_the_other_precision(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["online-imagenet", "--tiny", "--only", "source,norm-stats", "--results", str(tmp_path)]
    assert main(["bench", *flags, "--seeds", "1", "--device", "cpu", "--quiet"]) == 0
    capsys.readouterr()
    assert main(["bench", *flags, "--fast", "--list"]) == 0
    printed = capsys.readouterr().out
    assert "2 of these cells are finished in float32; leave --fast out to list them." in printed
    assert "finished  " not in printed
    assert listed([*flags, "--fast"], capsys)["finished_elsewhere"] == {"float32": 2}
    assert listed(flags, capsys)["finished_elsewhere"] == {"bf16": 0}
    assert main(["bench", *flags, "--list"]) == 0
    assert "of these cells are finished in" not in capsys.readouterr().out


def test_a_value_that_no_benchmark_reads_is_refused_with_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong, meant in (("shred=1", "shared"), ("posterir=FILE", "posterior")):
        assert main(["bench", "online-c10", "--tiny", "--list", "--json", "--set", wrong]) == 2
        message = json.loads(capsys.readouterr().out)["message"]
        assert message.startswith(f"--set {wrong}: no benchmark reads {wrong.partition('=')[0]!r}")
        assert f"did you mean {meant!r}?" in message
        assert "needed: one of dataset (offline, generalized)" in message
    with pytest.raises(OptionError, match="no benchmark reads 'colour'; needed"):
        Request(extra={"colour": "red"})


@pytest.mark.parametrize("benchmark", NAMES)
def test_a_value_is_refused_by_the_benchmarks_that_do_not_read_it(benchmark: str) -> None:
    for name, readers in EXTRA.items():
        request = Request(extra={name: "1"})
        if benchmark in readers:
            request.check_read_by(benchmark)
        else:
            with pytest.raises(OptionError, match=f"--set {name}=1 .* and not by {benchmark}; needed: "):
                request.check_read_by(benchmark)


def test_the_command_refuses_what_its_benchmark_does_not_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "online-c10", "--tiny", "--list", "--set", "dataset=office31"]) == 2
    assert "--set dataset=office31 is read by offline, generalized, and not by online-c10" in capsys.readouterr().err
    assert {reader for readers in EXTRA.values() for reader in readers} <= set(NAMES)
