"""Jobs that processes share, and records that they write together."""

import json
import multiprocessing
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

from undrift.system.lock import held
from undrift_bench.bench.harness.gathered import gather
from undrift_bench.bench.harness.shared_jobs import SharedJob, SharedJobs


def quiet(_line: str) -> None:
    """Say nothing."""


def noting(done: list[str], name: str, fails: bool = False) -> Callable[[], str]:
    def do() -> str:
        done.append(name)
        if fails:
            raise ValueError("no images")
        return "fine"

    return do


def test_a_job_is_done_once_and_after_what_it_needs(tmp_path: Path) -> None:
    done = list[str]()
    late = tmp_path / "late.tar"
    first = SharedJob("arrive", lambda: (late.touch(), "came")[1])
    jobs = [
        SharedJob("read", noting(done, "read"), files=(late,)),
        first,
        SharedJob("train", noting(done, "train"), ("read",)),
    ]
    for _ in range(2):
        SharedJobs(tmp_path / "jobs", jobs).work(60, quiet)
    assert done == ["read", "train"]
    assert (tmp_path / "jobs" / "train.done").read_text("utf-8").startswith("train (0.0 s): fine")


def test_a_failure_costs_only_what_needs_it(tmp_path: Path) -> None:
    done, said = list[str](), list[str]()
    names = {"a": ("fails", ()), "b": ("", ("a",)), "c": ("", ("b",)), "d": ("", ())}
    jobs = [SharedJob(name, noting(done, name, bool(how)), needs) for name, (how, needs) in names.items()]
    shared = SharedJobs(tmp_path, jobs)
    shared.work(60, said.append)
    assert done == ["a", "d"]
    assert shared.failed("a")
    assert not shared.done("c")
    assert "ValueError: no images" in said[0]


def test_a_job_of_another_process_is_left_to_it(tmp_path: Path) -> None:
    done = list[str]()
    shared = SharedJobs(tmp_path, [SharedJob("a", noting(done, "a")), SharedJob("b", noting(done, "b"))])
    with held(tmp_path / "a.lock") as mine:
        assert mine
        shared.work(0.5, quiet)
    assert done == ["b"]


def _add(place: Path, number: int) -> None:
    gather(place, {"cases": {str(number): number}})


def test_processes_that_add_to_one_record_lose_nothing(tmp_path: Path) -> None:
    place = tmp_path / "record.json"
    gather(place, {"sure": 8, "cases": {"old": -1}})
    processes = [multiprocessing.get_context("fork").Process(target=_add, args=(place, n)) for n in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    expected = {"old": -1} | {str(number): number for number in range(4)}
    assert json.loads(place.read_text("utf-8")) == {"sure": 8, "cases": expected}


def test_pacs_runs_whole_and_a_finished_job_not_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    benchmarks = Path(__file__).parents[2] / "benchmarks"
    monkeypatch.syspath_prepend(str(benchmarks))
    main = runpy.run_path(str(benchmarks / "pacs.py"))["main"]
    results = tmp_path / "results"
    given = ["--tiny", "--device", "cpu", "--cache", str(tmp_path / "cache"), "--results", str(results)]
    assert main(given) == 0
    places = {place: place.stat().st_mtime_ns for place in results.rglob("*.json")}
    names = sorted(place.name for place in places)
    assert names == [
        "helping.json",
        *(f"photo-{what}-exact-s0.json" for what in ("mixed", "sketch")),
        *(f"sketch-{what}-exact-s0.json" for what in ("mixed", "photo")),
        *(f"tiny.{task}.undrift.n40.s0.float32.json" for task in ("photo-sketch", "sketch-photo")),
    ]
    assert main(given) == 0
    assert places == {place: place.stat().st_mtime_ns for place in results.rglob("*.json")}
    assert main(["--take", str(results), "--results", str(tmp_path / "here")]) == 0
    assert sorted(place.name for place in (tmp_path / "here").rglob("*.json")) == names
