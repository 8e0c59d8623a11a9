"""A finished cell is never run again, an error stops nothing, a deadline is kept: whatever the benchmark."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from undrift import DataError
from undrift_bench.bench import (
    Benchmark,
    CannotRun,
    Cell,
    MethodRow,
    Outcome,
    Request,
    Store,
    about,
    chosen,
    in_order,
    listing,
    seeds_of,
)
from undrift_bench.bench.harness.request import TooLate
from undrift_bench.bench.harness.run import guessed_seconds, run, tables

ROWS = [
    MethodRow("good", "tent"),
    MethodRow("bad", "tent", {"stream_lr": 1.0}),
    MethodRow("late", "tent", tier="B", cost=3.0),
]


class Counting:
    """A benchmark that remembers which cells it ran."""

    name = "counting"

    def __init__(self, results: Mapping[str, Any] | None = None) -> None:
        self.ran: list[str] = []
        self.results = {"error": 0.25} if results is None else results

    def cells(self, request: Request) -> list[Cell]:
        rows = chosen(ROWS, request.only, request.tier)
        count = request.images or 10
        return [Cell("counting", "net", "main", r, s, count) for r in rows for s in seeds_of(r, request.seeds)]

    shown = cells

    def prepare(self, request: Request) -> Callable[[Cell, Any], Mapping[str, Any]]:
        def run_cell(cell: Cell, bar: Any) -> Mapping[str, Any]:
            self.ran.append(cell.key)
            if cell.row.name == "bad":
                raise ValueError("this method broke")
            return self.results

        return run_cell

    def markdown(self, store: Store, request: Request) -> str:
        return "\n".join(f"{cell.key} {store.state(cell)}" for cell in self.cells(request))

    def figures(self, store: Store, request: Request) -> dict[str, Callable[[Path], int]]:
        return {"-main": lambda path: path.write_text("drawn")}


def quietly(benchmark: Benchmark, request: Request) -> Any:
    said: list[str] = []
    outcome = run(benchmark, request, said.append, quiet=True)
    return outcome, said


def test_a_finished_cell_is_not_run_again_and_a_failed_one_is(tmp_path: Path) -> None:
    first, second, request = Counting(), Counting(), Request(results=tmp_path, seeds=2, device="cpu")
    outcome, said = quietly(first, request)
    assert (outcome.ran, outcome.failed, outcome.kept, outcome.left) == (3, 2, 0, 0)
    assert any("this method broke" in line for line in said)
    outcome, _ = quietly(second, request)
    assert (outcome.ran, outcome.failed, outcome.kept) == (0, 2, 3)
    assert all("bad" in key for key in second.ran)
    record = json.loads((tmp_path / "counting" / "net.main.bad.n10.s0.json").read_text())
    assert record["failed"] == "ValueError: this method broke"
    assert "error" not in record


def test_a_cell_that_another_process_is_at_is_left_to_it(tmp_path: Path) -> None:
    benchmark, request = Counting(), Request(results=tmp_path, only=("good",), seeds=2, device="cpu")
    other, cell = Store(tmp_path / "counting"), benchmark.cells(request)[0]
    with other.claim(cell) as mine:
        assert mine
        outcome, said = quietly(benchmark, request)
        assert (outcome.ran, outcome.left) == (1, 1)
        assert any(cell.key in line and "another process" in line for line in said)
        other.put(cell, {"error": 0.5})
    with Store(tmp_path / "counting").claim(cell) as mine:
        assert not mine  # finished meanwhile
    outcome, _ = quietly(benchmark, request)
    assert (outcome.ran, outcome.kept) == (0, 2)
    assert [key[-1] for key in benchmark.ran] == ["1"]
    assert not list(tmp_path.rglob("*.lock"))


def test_tables_show_what_other_processes_have_finished_meanwhile(tmp_path: Path) -> None:
    """A failure is read at the start, another process runs the cell, and this one writes the tables last."""
    request = Request(results=tmp_path, only=("good",), seeds=2, device="cpu")
    benchmark, other = Counting(), Store(tmp_path / "counting")
    first, second = benchmark.cells(request)
    other.put(first, {"failed": "out of memory"})
    other.put(second, {"failed": "out of memory"})
    with other.claim(first) as mine:
        assert mine

        class Meanwhile(Counting):
            def prepare(self, request: Request) -> Callable[[Cell, Any], Mapping[str, Any]]:
                def run_cell(cell: Cell, bar: Any) -> Mapping[str, Any]:
                    other.put(first, {"error": 0.5})
                    return {"error": 0.25}

                return run_cell

        outcome, _ = quietly(Meanwhile(), request)
    assert (outcome.ran, outcome.left) == (1, 0)
    assert outcome.text.splitlines()[:2] == [f"{first.key} finished", f"{second.key} finished"]


def test_a_folder_that_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "counting").write_text("a file where the folder should be")
    with pytest.raises(DataError, match=r"cannot be written .*; needed: .*--results"):
        quietly(Counting(), Request(results=tmp_path, only=("good",), seeds=1, device="cpu"))


def test_a_lock_that_was_deleted_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process fails, and lets its lock go, between our opening of the file and our lock on it."""
    cell = Counting().cells(Request(results=tmp_path, only=("good",), seeds=1, device="cpu"))[0]
    store, place = Store(tmp_path), tmp_path / f".{cell.key}.lock"
    monkeypatch.setattr("undrift.system.lock._lock", lambda _file: place.unlink() or True)
    with store.claim(cell) as mine:
        assert not mine


def test_a_failure_that_another_process_made_good_is_not_run_again(tmp_path: Path) -> None:
    cell = Counting().cells(Request(results=tmp_path, only=("good",), seeds=1, device="cpu"))[0]
    first, second = Store(tmp_path / "counting"), Store(tmp_path / "counting")
    first.put(cell, {"failed": "out of memory"})
    assert second.finished(cell) is None
    first.put(cell, {"error": 0.5})
    with second.claim(cell) as mine:
        assert not mine


def test_seed_0_of_everything_comes_first_and_tier_b_last(tmp_path: Path) -> None:
    benchmark = Counting()
    quietly(benchmark, Request(results=tmp_path, seeds=2, device="cpu"))
    assert [key.split(".")[2] + key[-1] for key in benchmark.ran] == ["good0", "bad0", "good1", "bad1", "late0"]


def test_files_are_written_and_cells_merge_by_copying(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    outcome, _ = quietly(Counting(), Request(results=here, only=("good",), seeds=1, device="cpu"))
    assert [path.name for path in outcome.wrote] == ["counting.json", "counting.md", "counting-main.png"]
    assert all(path.stat().st_size for path in outcome.wrote)
    assert "are not in these tables" not in outcome.text  # its cells are the same in either precision
    quietly(Counting(), Request(results=there, only=("late",), seeds=1, device="cpu"))
    for file in (there / "counting").iterdir():
        file.rename(here / "counting" / file.name)
    merged = Counting()
    outcome, _ = quietly(merged, Request(results=here, only=("good", "late"), seeds=1, device="cpu"))
    assert (outcome.kept, merged.ran) == (2, [])
    assert len(json.loads((here / "counting.json").read_text())["cells"]) == 2


def test_no_cell_is_started_that_would_end_after_the_deadline(tmp_path: Path) -> None:
    quietly(
        Counting({"error": 0.5, "seconds": 100.0}), Request(results=tmp_path, only=("good",), seeds=1, device="cpu")
    )
    late = Counting({"error": 0.5})
    outcome, said = quietly(late, Request(results=tmp_path, only=("good", "late"), seeds=2, deadline=60, device="cpu"))
    assert late.ran == []
    assert (outcome.kept, outcome.left) == (1, 2)
    assert "takes about 300 s: not started" in said[-1]  # three times Tent's cost
    enough = Counting({"error": 0.5, "seconds": 100.0})
    quietly(enough, Request(results=tmp_path, only=("good", "late"), seeds=2, deadline=200, device="cpu"))
    assert [key.split(".")[2] for key in enough.ran] == ["good"]


def test_nothing_known_means_no_guess_and_a_like_cell_is_one(tmp_path: Path) -> None:
    cells, store = Counting().cells(Request(seeds=2)), Store(tmp_path)
    assert guessed_seconds(cells[0], cells, store) == 0
    store.put(cells[0], {"seconds": 7.0})
    assert guessed_seconds(cells[1], cells, store) == 7.0


def test_a_cell_that_lacks_a_file_is_not_run_and_no_failure(tmp_path: Path) -> None:
    class Lacking(Counting):
        def prepare(self, request: Request) -> Callable[[Cell, Any], Mapping[str, Any]]:
            def run_cell(cell: Cell, bar: Any) -> Mapping[str, Any]:
                raise CannotRun("no weights")

            return run_cell

    request = Request(results=tmp_path, only=("good",), seeds=1, device="cpu")
    outcome, said = quietly(Lacking(), request)
    assert (outcome.failed, outcome.left) == (0, 1)
    assert "not run: no weights" in said[0]
    assert listing(Lacking(), request) == [("net.main.good.n10.s0", "not run")]


def test_a_page_with_cells_is_not_replaced_by_one_without(tmp_path: Path) -> None:
    request = Request(results=tmp_path, only=("good",), seeds=1, device="cpu")
    assert tables(Counting(), request).wrote  # an empty page where there is none
    quietly(Counting(), request)
    page = {path: path.read_bytes() for path in tmp_path.glob("counting*.*")}
    shutil.rmtree(tmp_path / "counting")
    outcome = tables(Counting(), request)
    assert (outcome.wrote, outcome.text.count("not run")) == ([], 3)
    assert {path: path.read_bytes() for path in tmp_path.glob("counting*.*")} == page
    (tmp_path / "counting.json").write_text("[")  # no page of ours: nothing is lost
    assert tables(Counting(), request).wrote


def test_tables_of_other_cells_have_names_of_their_own_and_fewer_seeds_do_not_shrink_one(tmp_path: Path) -> None:
    request = Request(results=tmp_path, only=("good",), device="cpu")
    quietly(Counting(), request)
    page = (tmp_path / "counting.json").read_bytes()
    tables(Counting(), replace(request, seeds=1))
    assert (tmp_path / "counting.json").read_bytes() == page
    outcome, _ = quietly(Counting(), replace(request, images=5))
    assert [path.name for path in outcome.wrote] == ["counting-n5.json", "counting-n5.md", "counting-n5-main.png"]
    assert (tmp_path / "counting.json").read_bytes() == page
    assert {"counting"} == {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert Request(images=5, extra={"epochs": "3", "task": "a-b"}).view == "-n5-task-a-b-epochs-3"


def test_a_float32_cell_does_not_replace_the_page_of_the_others(tmp_path: Path) -> None:
    class Both(Counting):
        def cells(self, request: Request) -> list[Cell]:
            return [replace(cell, precision=request.precision) for cell in super().cells(request)]

        shown = cells

    request = Request(results=tmp_path, only=("good",), fast=True, device="cpu")
    quietly(Both(), request)
    page = (tmp_path / "counting.json").read_bytes()
    outcome, _ = quietly(Both(), replace(request, fast=False, seeds=1))
    assert outcome.wrote[0] == tmp_path / "counting-float32.json"
    assert (tmp_path / "counting.json").read_bytes() == page


def test_an_outcome_says_what_went_wrong() -> None:
    assert "2 failed" in Outcome(ran=1, failed=2).trouble
    assert Outcome(lacking=[CannotRun("no file; needed: one. Name it.")]).trouble == (
        "nothing could be run: no file; needed: one. Name it."
    )
    lacks = CannotRun("no file")
    for fine in (Outcome(), Outcome(left=3), Outcome(ran=1, lacking=[lacks]), Outcome(kept=1, lacking=[lacks])):
        assert fine.trouble == ""
    assert Outcome(left=1, lacking=[TooLate("9 s are left.")]).trouble == ""


def test_another_number_of_images_or_other_settings_are_another_cell(tmp_path: Path) -> None:
    store, row = Store(tmp_path), MethodRow("vmp", "vmp", {"init_fraction": 0.04})
    cell = Cell("b", "net", "main", row, 0, 100)
    store.put(cell, {"error": 0.1})
    assert store.finished(cell) is not None
    assert store.finished(Cell("b", "net", "main", row, 0, 50)) is None
    other = Cell("b", "net", "main", MethodRow("vmp", "vmp", {"init_fraction": 0.1}), 0, 100)
    assert Store(tmp_path).finished(other) is None
    assert Store(tmp_path).state(other) == "stale"


def test_keys_are_plain_names_of_files() -> None:
    key = Cell("b", "wrn40_2", "batch-1", MethodRow("vmp:paper σ/2", "vmp"), 1, 100).key
    assert key == "wrn40_2.batch-1.vmp_paper_2.n100.s1"


def test_a_broken_record_says_what_to_do(tmp_path: Path) -> None:
    cell = Cell("b", "net", "main", ROWS[0], 0, 10)
    (tmp_path / f"{cell.key}.json").write_text("{")
    with pytest.raises(DataError, match="delete it"):
        Store(tmp_path).get(cell)


def test_rows_are_found_by_their_own_or_their_methods_name() -> None:
    rows = [
        MethodRow("vmp:paper", "vmp:paper"),
        MethodRow("sigma-0", "vmp:paper", control=True),
        MethodRow("tent", "tent:imagenet"),
    ]
    assert [r.name for r in chosen(rows, ("vmp",), None)] == ["vmp:paper"]
    assert [r.name for r in chosen(rows, ("sigma-0", "tent"), None)] == ["sigma-0", "tent"]
    assert [r.name for r in chosen(ROWS, (), "B")] == ["late"]
    assert in_order([]) == []


def test_a_table_says_how_its_numbers_came_about() -> None:
    record = {"hardware": "H", "torch": "2", "date": "2030-01-02", "fast": True, "seed": 0, "images": 5000}
    line = about([record, record | {"seed": 2, "date": "2030-01-05"}])
    assert (
        line == "H; torch 2; channels-last bfloat16; 2030-01-02 to 2030-01-05; seeds 0, 2; 5,000 images of each domain."
    )
    assert about([]) == "Nothing was run yet."


def test_a_benchmark_is_known_by_what_it_has() -> None:
    assert isinstance(Counting(), Benchmark)
    assert not isinstance(print, Benchmark)
