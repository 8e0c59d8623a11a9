"""Times are taken of finished cells alone, few batches each; they change nothing else, and tables say how."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import undrift
from undrift import OptionError
from undrift.cli import main
from undrift.images.corrupt import CORRUPTIONS
from undrift_bench.bench import Benchmark, Outcome, Request, Store, find
from undrift_bench.bench.harness.measure import machine
from undrift_bench.bench.harness.run import run
from undrift_bench.bench.harness.timed import how_timed
from undrift_bench.bench.offline import report as offline_report
from undrift_bench.bench.offline.benchmark import Offline
from undrift_bench.bench.offline.sets import DataSet
from undrift_bench.bench.offline.sources import Setup
from undrift_bench.bench.offline.tiny import tiny_setup
from undrift_bench.bench.online import report as online_report
from undrift_bench.bench.online.corrupted import Corrupted
from undrift_bench.bench.times.take import take_times, timer_of
from undrift_bench.bench.times.timers import BATCHES, StepTimer, StreamTimer

TIMED = BATCHES - BATCHES // 3
HERE = machine(torch.device("cpu"))


@pytest.fixture(autouse=True)
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    for report in (online_report, offline_report):
        monkeypatch.setattr(report, "figures", lambda *_: {})  # they take longer than all the rest


def bench(name: str = "online-c10") -> Benchmark:
    found = find(name)
    assert isinstance(found, Benchmark)
    return found


def tiny(folder: Path, *only: str, **more: Any) -> Request:
    return Request(**{"results": folder, "tiny": True, "only": only, "seeds": 1, "device": "cpu", **more})


def shared(benchmark: Benchmark, request: Request) -> None:
    """Run cells as beside other work: without a time."""
    outcome = run(benchmark, replace(request, extra={"shared": "1"}), lambda _: None, quiet=True)
    assert outcome.ran > 0
    assert outcome.failed == 0


def take(benchmark: Benchmark, request: Request) -> tuple[Outcome, list[str]]:
    said: list[str] = []
    return take_times(benchmark, request, said.append, quiet=True), said


def files(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


@pytest.mark.slow
def test_a_time_goes_into_the_first_seed_and_nothing_else_changes(tmp_path: Path) -> None:
    request = tiny(tmp_path, "tent", seeds=2)
    shared(bench(), request)
    before = files(tmp_path / "online-c10")
    outcome, said = take(bench(), request)
    assert (outcome.ran, outcome.failed, outcome.kept, outcome.left) == (1, 0, 0, 0)
    assert "ms a batch" in said[0]
    after = files(tmp_path / "online-c10")
    first, second = sorted(after)
    assert after[second] == before[second]
    assert list(before[first].items()) != list(after[first].items())
    timed = after[first].pop("timed")
    assert timed == {"batches": TIMED, **HERE}
    assert after[first].pop("milliseconds") > 0
    assert before[first].pop("milliseconds") is None
    assert list(after[first].items()) == list(before[first].items())  # in their order, too


@pytest.mark.slow
@pytest.mark.parametrize("name", ["online-c100", "offline"])
def test_the_tables_column_is_filled_and_its_foot_says_how(name: str, tmp_path: Path) -> None:
    request = tiny(tmp_path, "source", "norm-stats", cache=tmp_path / "cache")
    shared(bench(name), request)
    foot = f"- Times were measured alone on {HERE['hardware']} (torch {HERE['torch']}, {HERE['date']}), over "
    assert foot not in (tmp_path / f"{name}.md").read_text()
    outcome, _ = take(bench(name), request)
    assert outcome.ran == 2
    text = (tmp_path / f"{name}.md").read_text()
    assert text == outcome.text
    assert foot in text
    header = next(line.split(" | ") for line in text.splitlines() if "ms a batch" in line)
    line = next(line.split(" | ") for line in text.splitlines() if line.startswith("| norm-stats |"))
    assert float(line[header.index("ms a batch")]) > 0


@pytest.mark.slow
def test_what_has_a_time_is_not_timed_again_until_its_cell_is_new(tmp_path: Path) -> None:
    request = tiny(tmp_path, "tent", "source")
    store, (source, tent) = Store(tmp_path / "online-c10"), bench().cells(tiny(tmp_path, "source", "tent"))
    shared(bench(), tiny(tmp_path, "tent"))
    outcome, _ = take(bench(), request)
    assert (outcome.ran, outcome.kept, outcome.left) == (1, 0, 1)  # a row without a finished cell is not timed
    assert store.state(source) == "not run"
    assert take(bench(), request)[0].kept == 1

    elsewhere = dict(store.finished(tent) or {})
    store.put(tent, elsewhere | {"milliseconds": 1e9, "timed": elsewhere["timed"] | {"hardware": "another machine"}})
    assert take(bench(), request)[0].ran == 1
    record = Store(store.folder).finished(tent)
    assert record is not None
    assert record["milliseconds"] < 1e9
    assert record["timed"]["hardware"] == HERE["hardware"]

    (store.folder / f"{tent.key}.json").unlink()
    shared(bench(), tiny(tmp_path, "tent"))
    assert take(bench(), request)[0].ran == 1
    (store.folder / f"{tent.key}.json").unlink()
    run(bench(), tiny(tmp_path, "tent"), lambda _: None, quiet=True)  # takes its own time
    outcome, _ = take(bench(), request)
    assert (outcome.ran, outcome.kept) == (0, 1)


@pytest.mark.slow
def test_few_batches_of_one_corruption_are_made_and_no_answer_is_asked_for_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = tiny(tmp_path, "tent", settings=("gradual",))
    shared(bench(), request)
    made: list[tuple[Any, int]] = []
    asked = 0
    held, step = Corrupted.held, undrift.Stream.__next__

    def remember(self: Corrupted, kinds: Any, count: int) -> Any:
        made.append((list(kinds), count))
        return held(self, kinds, count)

    def count(self: undrift.Stream) -> Any:
        nonlocal asked
        asked += 1
        return step(self)

    monkeypatch.setattr(Corrupted, "held", remember)
    monkeypatch.setattr(undrift.Stream, "__next__", count)
    monkeypatch.setattr(undrift, "predict", None)
    assert take(bench(), replace(request, cache=tmp_path / "cache"))[0].ran == 1
    assert made == [([("gaussian_noise", 1)], 12)]
    assert asked == BATCHES
    assert not (tmp_path / "cache").exists()


@pytest.mark.slow
def test_batches_have_the_size_of_the_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    step = undrift.Stream._answer

    def measure(self: undrift.Stream, images: torch.Tensor) -> Any:
        sizes.append(len(images))
        return step(self, images)

    for more, size in (({"settings": ("batch-4",)}, 4), ({"images": 5}, 5), ({}, 6)):
        request = tiny(tmp_path, "source", **more)
        shared(bench(), request)
        with monkeypatch.context() as patched:
            patched.setattr(undrift.Stream, "_answer", measure)
            assert take(bench(), request)[0].ran == 1
        assert max(sizes) == size
        sizes.clear()


def test_an_adaptation_ends_after_its_first_steps(tmp_path: Path) -> None:
    def long(dataset: DataSet, request: Request) -> Setup:
        return replace(tiny_setup(dataset), epochs=100)

    benchmark, request = Offline(make_setup=long), tiny(tmp_path, "shot", settings=("photo-sketch",))
    cell = benchmark.cells(request)[0]
    Store(tmp_path / "offline").put(cell, {"accuracy": 0.5, "milliseconds": None})
    timer = timer_of(benchmark, request)
    assert isinstance(timer, StepTimer)
    taken = timer(cell)
    assert taken.batches == TIMED  # of whole steps, of which a third warms up
    assert taken.note == "source network not trained"
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.slow
def test_a_row_of_all_tasks_is_timed_once_with_its_trained_source(tmp_path: Path) -> None:
    request = tiny(tmp_path, "shot", "gsfda", cache=tmp_path / "cache")
    shared(bench("offline"), request)
    outcome, _ = take(bench("offline"), request)
    assert (outcome.ran, outcome.kept, outcome.left) == (2, 0, 0)
    timed = [record for record in files(tmp_path / "offline").values() if record["milliseconds"] is not None]
    assert [(record["row"], record["setting"], record["seed"]) for record in timed] == [
        *(("gsfda", "photo-sketch", 0), ("shot", "photo-sketch", 0)),
    ]
    assert all("note" not in record["timed"] for record in timed)


@pytest.mark.slow
def test_cells_are_timed_in_their_own_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = tiny(tmp_path, "source")
    shared(bench(), replace(request, fast=True))
    seen: list[bool] = []
    call = StreamTimer.__call__

    def look(self: StreamTimer, cell: Any) -> Any:
        seen.append(self.streaming.request.fast)
        return call(self, cell)

    monkeypatch.setattr(StreamTimer, "__call__", look)
    assert take(bench(), request)[0].ran == 1
    assert seen == [True]


@pytest.mark.slow
def test_what_was_timed_before_a_stop_stays_and_a_row_that_breaks_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = tiny(tmp_path, "source", "norm-stats", "tent")
    shared(bench(), request)
    before = files(tmp_path / "online-c10")
    call = StreamTimer.__call__

    def stop(error: BaseException) -> Any:
        def timer(self: StreamTimer, cell: Any) -> Any:
            if cell.row.name == "norm-stats":
                raise error
            return call(self, cell)

        return timer

    with monkeypatch.context() as patched:
        patched.setattr(StreamTimer, "__call__", stop(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            take(bench(), request)
    times = {record["row"]: record["milliseconds"] for record in files(tmp_path / "online-c10").values()}
    assert times["source"] > 0
    assert times["tent"] is None
    with monkeypatch.context() as patched:
        patched.setattr(StreamTimer, "__call__", stop(ValueError("no such kernel")))
        outcome, said = take(bench(), request)
    assert (outcome.ran, outcome.failed, outcome.kept) == (1, 1, 1)
    assert any("not timed: ValueError: no such kernel" in line for line in said)
    broken = next(name for name in before if "norm-stats" in name)
    assert files(tmp_path / "online-c10")[broken] == before[broken]
    outcome, _ = take(bench(), request)
    assert (outcome.ran, outcome.failed, outcome.kept) == (1, 0, 2)


@pytest.mark.slow
def test_a_missing_network_and_a_deadline_leave_rows_untimed(tmp_path: Path) -> None:
    request = Request(results=tmp_path, data=tmp_path, only=("source", "tent"), seeds=1, device="cpu", fast=True)
    store, cells = Store(tmp_path / "online-c10"), bench().cells(replace(request, networks=("wrn40_2",)))
    domains = {name: {"error": 0.5} for name in CORRUPTIONS}
    for cell in cells:
        store.put(cell, {"error": 0.5, **HERE, "fast": True, "milliseconds": None, "domains": domains})
    outcome, said = take(bench(), request)
    assert (outcome.ran, outcome.failed, outcome.left) == (0, 0, 4)
    assert [line for line in said if "--weights wrn40_2=FILE" in line] == said
    assert len(said) == 1

    request = tiny(tmp_path, "source", "norm-stats", "tent")
    shared(bench(), request)
    outcome, _ = take(bench(), replace(request, deadline=1e-6))
    assert (outcome.ran, outcome.left) == (0, 3)


def test_times_of_several_machines_are_told_apart() -> None:
    timed = {"batches": 17, "hardware": "A", "torch": "2", "date": "2030-01-02"}
    rows = {
        "tent": [{"milliseconds": 1.0, "timed": timed}, {"milliseconds": None}],
        "eata": [{"milliseconds": 1.0, "timed": timed | {"hardware": "B", "batches": 1, "note": "odd"}}],
        "roid": [{"milliseconds": 1.0}],
        "sar": [{"timed": timed}],
    }
    assert how_timed(rows) == [
        "- Times of tent were measured alone on A (torch 2, 2030-01-02), over 17 batches.",
        "- Times of eata were measured alone on B (torch 2, 2030-01-02), over 1 batch; odd.",
    ]
    assert how_timed({"roid": [{"milliseconds": 1.0}]}) == []


def test_what_cannot_be_timed_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OptionError, match="times need it alone"):
        take(bench(), tiny(tmp_path, extra={"shared": "1"}))
    with pytest.raises(OptionError, match="Leave --times out"):
        take(bench("analysis"), tiny(tmp_path))
    assert main(["bench", "table1", "--times"]) == 2
    assert "Leave --times out" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_counts_what_it_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["bench", "online-imagenet", "--tiny", "--results", str(tmp_path), "--only", "source", "--device", "cpu"]
    flags += ["--json", "--quiet", "--seeds", "1"]
    assert main([*flags, "--set", "shared=1"]) == 0
    for timed, kept in ((1, 0), (0, 1)):
        capsys.readouterr()
        assert main([*flags, "--times"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["timed"], found["kept"], found["left"]) == (timed, kept, 0)
        assert "ran" not in found
