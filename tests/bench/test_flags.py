"""What `undrift bench` would ignore it refuses with three facts; a list says what it does not show."""

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from undrift import OptionError
from undrift.cli import main
from undrift_bench.bench import NAMES, Request, find
from undrift_bench.bench.harness.request import CELLS as WITH_CELLS
from undrift_bench.bench.harness.request import EXTRA, OPTIONS, WEIGHTS, TooLate
from undrift_bench.bench.online.benchmark import OnlineBenchmark

INSTEAD = ("--list", "--tables", "--times")
TOGETHER = [flags for count in (2, 3) for flags in combinations(INSTEAD, count)]
ROOT = Path(__file__).parents[2]
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


@pytest.mark.slow
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


def held(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["online-c10", "--only", "source"],
        pytest.param(["generalized", "--only", "source"], marks=pytest.mark.slow),
        pytest.param(["analysis", "--only", "beta"], marks=pytest.mark.slow),
    ],
    ids=lambda words: words[0],
)
def test_a_tiny_run_leaves_the_real_pages_alone(words: list[str], tmp_path: Path) -> None:
    for name in ("online-c10", "offline", "generalized", "analysis"):
        for ending in (".json", ".md", ".png"):
            (tmp_path / f"{name}{ending}").write_text("real")
    before = held(tmp_path)
    assert main(["bench", *words, "--tiny", "--device", "cpu", "--quiet", "--results", str(tmp_path)]) == 0
    after = held(tmp_path)
    assert {name: after[name] for name in before} == before
    assert {name.partition("/")[0] for name in set(after) - set(before)} == {"tiny"}


def test_a_tiny_speed_leaves_the_real_record_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "undrift_bench.bench.speed.benchmark.PARTS", {"startup": lambda *_: iter([{"what": "a", "seconds": 1.0}])}
    )
    (tmp_path / "speed-cpu.json").write_text("real")
    assert main(["bench", "speed", "--tiny", "--device", "cpu", "--quiet", "--results", str(tmp_path)]) == 0
    assert set(held(tmp_path)) == {"speed-cpu.json", "tiny/speed-cpu.json", "tiny/speed-cpu.md"}
    assert (tmp_path / "speed-cpu.json").read_text() == "real"


def test_every_benchmark_can_be_tried_and_table1_is_one(tmp_path: Path) -> None:
    assert set(OPTIONS["--tiny"]) == set(NAMES)
    assert main(["bench", "table1", "--tiny", "--quiet", "--results", str(tmp_path)]) == 0
    assert set(held(tmp_path)) == {"tiny/table1.json", "tiny/table1.md"}


@pytest.mark.parametrize(
    ("words", "ending"),
    [
        (["online-c10", "--images", "500"], "-n500"),
        (["analysis", "--set", "epochs=3"], "-epochs-3"),
        (["analysis", "--set", "task=photo-cartoon"], "-task-photo-cartoon"),
    ],
)
def test_a_view_of_other_cells_leaves_the_real_page_alone(words: list[str], ending: str, tmp_path: Path) -> None:
    (tmp_path / f"{words[0]}.json").write_text("real")
    assert main(["bench", *words, "--tables", "--results", str(tmp_path), "--quiet"]) == 0
    assert (tmp_path / f"{words[0]}.json").read_text() == "real"
    assert (tmp_path / f"{words[0]}{ending}.md").is_file()


def test_nothing_finished_leaves_a_page_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "online-c10.json"
    page.write_text('{"cells": [1]}')
    assert main(["bench", "online-c10", "--tables", "--results", str(tmp_path), "--json", "--quiet"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["wrote"] == []
    assert "No page was written" in printed.err
    assert page.read_text() == '{"cells": [1]}'


IGNORED = [
    *(["table1", *words] for words in (["--only", "tent"], ["--settings", "all"], ["--networks", "foo"])),
    *(["speed", *words] for words in (["--settings", "all"], ["--networks", "foo"], ["--tier", "B"], ["--fast"])),
    *(["speed", *words] for words in (["--seeds", "3"], ["--weights", "wrn40_2=x"], ["--resnet50", "x"])),
    *(["analysis", *words] for words in (["--networks", "foo"], ["--seeds", "3"], ["--weights", "wrn28_10=x"])),
    ["offline", "--networks", "foo"],
    ["online-imagenet", "--weights", "resnet50=x"],
]


@pytest.mark.parametrize("words", IGNORED, ids=" ".join)
def test_an_option_that_a_benchmark_does_not_read_is_refused(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words, "--results", str(tmp_path), "--json"]) == 2
    message = json.loads(capsys.readouterr().out)["message"]
    assert message.startswith(words[1])
    assert f"and not by {words[0]}; needed: " in message
    assert message.endswith("Leave it out.")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mode", [["--list"], ["--tables"], ["--times"], []], ids=" ".join)
@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--only", "tent", "--tier", "B"], "no cell of online-c10 is left by --only tent --tier B; needed: one"),
        (["--networks", "foo", "--tiny"], "there is no network 'foo' here; needed: wrn28_10, wrn40_2"),
        (["--weights", "foo=/nope"], "--weights foo is read by no benchmark; needed: one of wrn28_10, wrn40_2. Leave"),
        (["--weights", "wrn40-2=x"], "--weights wrn40-2 is read by no benchmark (did you mean 'wrn40_2'?); needed"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_a_selection_of_nothing_is_refused(
    words: list[str], found: str, mode: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "online-c10", *words, *mode, "--results", str(tmp_path), "--json", "--device", "cpu"]) == 2
    assert json.loads(capsys.readouterr().out)["message"].startswith(found)
    assert not list(tmp_path.iterdir())


def test_analysis_has_no_tier_a(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "analysis", "--tier", "A", "--list"]) == 2
    assert "no cell of analysis is left by --tier A; needed" in capsys.readouterr().err


@pytest.mark.parametrize("name", [WITH_CELLS[0], *(pytest.param(n, marks=pytest.mark.slow) for n in WITH_CELLS[1:])])
def test_one_line_of_what_a_machine_has_serves_every_benchmark_with_cells(name: str, tmp_path: Path) -> None:
    here = ["--data", "D", "--cache", "C", "--frost", "F", "--wrn2810", "x", "--resnet50", "y", "--device", "cuda"]
    words = ["bench", name, "--tables", "--fast", *here, "--set", "shared=1", "--quiet", "--results", str(tmp_path)]
    assert main(words) == 0


def test_the_tables_of_what_is_read_name_what_there_is() -> None:
    assert {reader for table in (OPTIONS, WEIGHTS) for readers in table.values() for reader in readers} <= set(NAMES)
    online = {name: found for name in NAMES if isinstance(found := find(name), OnlineBenchmark)}
    for name, found in online.items():
        assert {network for network, readers in WEIGHTS.items() if name in readers} == {n.name for n in found.networks}


@pytest.mark.slow
def test_the_exit_code_says_whether_it_was_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*CELLS, "--results", str(tmp_path), "--json"]
    assert main([word for word in flags if word != "--tiny"] + ["--data", "nowhere"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["error"] == "DataError"
    assert found["message"].startswith("nothing could be run: there is no ")
    assert "; needed: its weights. Name" in found["message"]

    def ending(error: Exception) -> int:
        def run_cell(*_: object) -> None:
            raise error

        monkeypatch.setattr("undrift_bench.bench.online.streaming.Streaming.__call__", run_cell)
        return main(flags)

    assert ending(ValueError("it broke")) == 1
    printed = capsys.readouterr()
    assert "1 failed, with the messages above; needed" in json.loads(printed.out)["message"]
    assert "failed: ValueError: it broke" in printed.err
    assert ending(TooLate("9 s are left.")) == 0
    monkeypatch.undo()
    assert main(flags) == 0
    assert main(flags) == 0  # finished already
    assert main([*flags[:3], "--only", "source,bacs", *flags[5:]]) == 0  # a part that is lacking, beside one that ran
