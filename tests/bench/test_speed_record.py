"""The record of `undrift bench speed`: written row by row, parts kept, old ones readable; its tables and figure."""

import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from undrift_bench.bench import Request
from undrift_bench.bench.speed import benchmark, report
from undrift_bench.bench.speed import benchmark as speed
from undrift_bench.bench.speed.figure import figure
from undrift_bench.bench.speed.growth import growth
from undrift_bench.bench.speed.jobs import Incomplete, streamed
from undrift_bench.bench.speed.predict import FORM

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
WHERE = {"machine": {"hardware": "a CPU", "torch": "2.0", "date": "2026-01-02"}}
ROWS = [{"what": "import torch", "seconds": 1.0}, {"what": "import undrift", "seconds": 1.5}]


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, rows: list[Any], part: str = "startup") -> dict[str, Any]:
    """Return the record after a part that gives these rows; one that is an exception ends it."""

    def measure(*_args: Any) -> Iterator[dict[str, Any]]:
        for row in rows:
            if isinstance(row, BaseException):
                raise row
            yield row

    monkeypatch.setitem(benchmark.PARTS, part, measure)
    with suppress(KeyboardInterrupt):
        benchmark.benchmark(Request(results=folder, device="cpu", only=(part,)), say=lambda _: None)
    return dict(json.loads((folder / "speed-cpu.json").read_text(encoding="utf-8")))


def test_what_was_measured_before_an_interruption_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(tmp_path, monkeypatch, [*ROWS, KeyboardInterrupt()])
    assert found["unfinished"]["startup"]["rows"] == ROWS
    assert "startup" not in found
    assert list(tmp_path.iterdir()) == [tmp_path / "speed-cpu.json"]
    # Another part keeps it, and shows it; the same one replaces it.
    other = [{"axis": "batch", "size": 2, "kind": "tent", "ms": 3.0}]
    assert run(tmp_path, monkeypatch, other, "growth")["unfinished"] == found["unfinished"]
    assert "# Unfinished: startup\n\n2 rows" in (tmp_path / "speed-cpu.md").read_text(encoding="utf-8")
    whole = run(tmp_path, monkeypatch, ROWS)
    assert whole["startup"]["rows"] == ROWS
    assert whole["growth"]["rows"] == other
    assert "unfinished" not in whole


def test_a_run_that_is_interrupted_does_not_replace_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, monkeypatch, ROWS)
    found = run(tmp_path, monkeypatch, [{"what": "import torch", "seconds": 9.0}, KeyboardInterrupt()])
    assert found["startup"]["rows"] == ROWS
    assert [row["seconds"] for row in found["unfinished"]["startup"]["rows"]] == [9.0]


def test_a_part_that_died_or_failed_all_along_does_not_replace_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, monkeypatch, ROWS)
    found = run(tmp_path, monkeypatch, [{"what": "import torch", "seconds": 9.0}, Incomplete("killed")])
    assert found["startup"]["rows"] == ROWS
    assert len(found["unfinished"]["startup"]["rows"]) == 1
    found = run(tmp_path, monkeypatch, [{"what": "import torch", "error": "out of memory"}])
    assert found["startup"]["rows"] == ROWS


def test_growth_goes_on_after_the_sizes_that_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def stopped(job: dict[str, Any], *_args: Any) -> Iterator[dict[str, Any]]:
        asked.append([(axis, case[axis]) for axis, case in job["cases"]])
        points = [(axis, size, kind) for axis, size in asked[-1] for kind in job["kinds"]]
        for n, (axis, size, kind) in enumerate(points):
            if len(asked) == 1 and n == 4:
                raise KeyboardInterrupt
            yield {"axis": axis, "size": size, "kind": kind, "ms": 1.0 * len(asked), "peak": 1.0, "before": 0.0}

    monkeypatch.setattr(speed, "streamed", stopped)
    request = Request(results=tmp_path, device="cpu", only=("growth",), tiny=True)
    with suppress(KeyboardInterrupt):
        benchmark.benchmark(request, say=lambda _: None)
    kept = tmp_path / "speed-cpu.json"
    left = kept.read_text(encoding="utf-8")
    benchmark.benchmark(request, say=lambda _: None)
    assert asked == [[("batch", 2), ("batch", 4)], [("batch", 4)]]
    found = json.loads(kept.read_text(encoding="utf-8"))
    assert [row["ms"] for row in found["growth"]["rows"]] == [1.0] * 3 + [2.0] * 3
    assert "unfinished" not in found
    # Rows of another machine are not gone on with.
    other = json.loads(left)
    other["unfinished"]["growth"]["machine"]["hardware"] = "another"
    kept.write_text(json.dumps(other), encoding="utf-8")
    benchmark.benchmark(request, say=lambda _: None)
    assert asked[2] == asked[0]


@pytest.mark.slow
def test_a_process_that_dies_is_no_finished_part() -> None:
    rows = streamed({"look": "no such look"}, torch.device("cpu"), lambda _: None)
    with pytest.raises(Incomplete):
        list(rows)


def test_a_part_that_a_machine_does_not_have_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(tmp_path, monkeypatch, [], "launches") == {}


@pytest.mark.slow
def test_records_of_before_have_tables_and_a_figure(tmp_path: Path) -> None:
    for name in ("speed-cuda", "speed-cpu"):
        shutil.copy(RESULTS / f"{name}.json", tmp_path)
        page, picture = benchmark.pages(tmp_path / f"{name}.json")
        assert page.read_text(encoding="utf-8") == (RESULTS / f"{name}.md").read_text(encoding="utf-8")
        assert picture.stat().st_size > 10_000


def test_memory_that_may_be_of_another_size_is_left_out() -> None:
    point = {"axis": "batch", "size": 8, "ms": 2.0}
    old = [point | {"kind": kind, "peak": 100.0} for kind in ("tent", "vmp", "fine-tune")]
    text = growth({"rows": old} | WHERE)
    assert "MiB" not in text
    assert "No memory" in text
    new = [row | {"peak": 100.0 + n, "before": 7.0} for n, row in enumerate(old)]
    assert "| batch | 8 | 2.0 | 2.0 | 2.0 | 1.00 | 100 | 101 | 102 |" in growth({"rows": new} | WHERE)
    kept = [row | {"peak": None, "kept": 50.0} for row in old]
    assert "Tent MiB kept" in growth({"rows": kept} | WHERE)


@pytest.mark.parametrize(("memory", "panels"), [({}, 2), ({"peak": 9.0, "before": 1.0}, 4), ({"kept": 3.0}, 4)])
def test_the_figure_has_a_row_of_panels_for_memory(
    memory: dict[str, float], panels: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"axis": axis, "size": size, "kind": kind, "ms": 1.0 * size} | memory
        for axis in ("batch", "width") for size in (2, 4) for kind in ("tent", "vmp", "fine-tune")
    ]  # fmt: skip
    drawn = []
    monkeypatch.setattr("undrift_bench.bench.speed.figure._save", lambda picture, _path: drawn.append(picture) or 1)
    figure(tmp_path / "growth.png", {"growth": {"rows": rows}})
    plots = drawn[0].axes
    assert len(plots) == panels
    assert all(len(plot.lines) == 3 for plot in plots)
    if memory:
        assert plots[2].get_ylabel() == f"MiB {'kept' if 'kept' in memory else 'allocated'}"
        assert list(plots[3].lines[1].get_ydata()) == [memory.get("peak", 3.0)] * 2


def test_steps_show_reserved_memory_where_a_graph_hides_its_own() -> None:
    row = {"case": {"network": "WRN-28", "batch": 2}, "kind": "tent", "compiled": True, "low": True, "peak": 2048.0}
    rows = [row | {"ms": 2.0, "reserved": 3072.0}, row | {"ms": 1.0, "graphs": True, "reserved": 4096.0}]
    rows.append(row | {"kind": "vmp", "ms": 3.0, "extra_ms": 0.5, "extra_bytes": 2e9, "operations": 5e9})
    lines = [line.split("|")[4:-1] for line in report.steps({"rows": rows} | WHERE).splitlines()[2:7]]
    assert [[cell.strip() for cell in line] for line in (lines[0], *lines[2:])] == [
        ["ms", "× fastest Tent", "floor ×", "GB more", "G operations more", "GiB allocated", "GiB reserved"],
        ["2.0", "2.00", "–", "–", "–", "2.00", "3.00"],
        ["1.0", "1.00", "–", "–", "–", "–", "4.00"],
        ["3.0", "3.00", "1.50", "2.0", "5.0", "2.00", "–"],
    ]
    tried = report.steps({"rows": rows, "cudnn_benchmark": True} | WHERE)
    assert "trial" in tried.splitlines()[0]


def test_predictions_stand_beside_their_bars() -> None:
    row = {"network": "wrn28_10", "low": True, "batch": 200, "forward_ms": 6.0, "fast": FORM}
    rows = [row | {"way": "full, folded", "ratio": 11.5}, row | {"way": "fast", "ratio": 2.9}]
    text = report.text({"predict": {"rows": rows} | WHERE})
    assert "| full, ten draws folded | **11.50** | ≤ 11 |" in text
    assert "| fast | 2.90 | ≤ 3 |" in text
    assert "WRN-28-10, channels-last bf16; a CPU" in text
    rows[1] = rows[1] | {"fast": "a form of old"}
    assert "| fast | not measured | ≤ 3 |" in report.text({"predict": {"rows": rows} | WHERE})
