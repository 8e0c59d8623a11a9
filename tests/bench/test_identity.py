"""What a finished cell is of: its precision, and all that its row comes to; a changed method is run again."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from undrift import OptionError, methods
from undrift_bench.bench import Cell, MethodRow, Request, Store, chosen, find, listing
from undrift_bench.bench.harness.resolved import canonical, fingerprint, resolved
from undrift_bench.bench.harness.run import run, tables
from undrift_bench.bench.harness.table import footnotes, marked, several_sources
from undrift_bench.bench.online.benchmark import OnlineBenchmark

ROOT = Path(__file__).parents[2]
CELL = Cell("b", "net", "main", MethodRow("tent", "tent"), 0, 10)


class Plain:
    """A benchmark of one row, whose cell gives one number."""

    name = "plain"

    def cells(self, request: Request) -> list[Cell]:
        return [Cell("plain", "net", "main", CELL.row, s, 10, request.precision) for s in range(request.seeds)]

    shown = cells

    def prepare(self, request: Request) -> Callable[[Cell, Any], Mapping[str, Any]]:
        return lambda _cell, _bar: {"error": 0.25 if request.fast else 0.75}

    def markdown(self, store: Store, request: Request) -> str:
        return " ".join(str(record["error"]) for record in store.all(self.cells(request))) + "\n"

    def figures(self, store: Store, request: Request) -> dict[str, Callable[[Path], int]]:
        return {}


def quiet(_: str) -> None:
    pass


@pytest.fixture
def other_tent(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Give Tent another default rate, as a new version might."""

    def change() -> None:
        tent = methods.METHODS["tent"]
        monkeypatch.setitem(methods.METHODS, "tent", replace(tent, options=tent.options.replace(stream_lr=2e-3)))
        from undrift_bench.bench.harness.resolved import _fingerprint

        _fingerprint.cache_clear()
        monkeypatch.setattr("undrift_bench.bench.harness.resolved._fingerprint", _fingerprint.__wrapped__)

    return change


def test_both_precisions_lie_side_by_side_and_never_in_one_mean(tmp_path: Path) -> None:
    half = Request(results=tmp_path, fast=True, seeds=1, device="cpu")
    whole = replace(half, fast=False, seeds=2)
    assert run(Plain(), half, quiet, quiet=True).ran == 1
    # Without a float32 cell there is one kind of table only, and --fast need not be said.
    assert tables(Plain(), whole).text == "0.25\n"
    outcome = run(Plain(), whole, quiet, quiet=True)
    assert outcome.ran == 2
    assert outcome.text.startswith("0.75 0.75\n")
    assert "1 finished cells in bf16 are not in these tables" in outcome.text
    assert tables(Plain(), half).text.startswith("0.25\n")
    assert {path.name for path in (tmp_path / "plain").iterdir()} == {
        *("net.main.tent.n10.s0.json", "net.main.tent.n10.s0.float32.json", "net.main.tent.n10.s1.float32.json"),
    }


def test_a_changed_default_makes_a_cell_stale(tmp_path: Path, other_tent: Callable[[], None]) -> None:
    request = Request(results=tmp_path, fast=True, seeds=1, device="cpu")
    run(Plain(), request, quiet, quiet=True)
    assert listing(Plain(), request) == [("net.main.tent.n10.s0", "finished")]
    other_tent()
    assert listing(Plain(), request) == [("net.main.tent.n10.s0", "stale")]
    assert tables(Plain(), request).text == "\n"
    assert tables(Plain(), request).left == 1
    assert run(Plain(), request, quiet, quiet=True).ran == 1
    assert listing(Plain(), request) == [("net.main.tent.n10.s0", "finished")]


def test_a_record_without_a_hash_is_stale(tmp_path: Path) -> None:
    old = {name: value for name, value in CELL.identity.items() if name not in ("resolved", "precision")}
    (tmp_path / f"{CELL.key}.json").write_text(json.dumps(old | {"error": 0.1}))
    assert Store(tmp_path).state(CELL) == "stale"
    assert Store(tmp_path).all([CELL]) == []


def test_a_stale_record_with_a_note_is_shown_without_what_it_withholds(tmp_path: Path) -> None:
    note = {"note": "error only: another scale.", "withheld": ["nll", "ece"]}
    old = CELL.identity | {"resolved": "another", "error": 0.1, "nll": 1.5, "ece": 0.6} | note
    (tmp_path / f"{CELL.key}.json").write_text(json.dumps(old))
    store = Store(tmp_path)
    assert store.state(CELL) == "stale"
    assert store.finished(CELL) is None
    shown = store.shown(CELL)
    assert shown is not None
    assert shown["error"] == 0.1
    assert not {"nll", "ece"} & shown.keys()
    assert marked("tent", [shown]) == "tent †"
    assert footnotes({"tent": [shown]}) == ["- † tent: error only: another scale."]


def test_a_row_of_another_machine_says_so() -> None:
    rows = {"tent": [{"hardware": "A"}], "roid": [{"hardware": "A"}], "undrift": [{"hardware": "B"}]}

    assert footnotes(rows) == ["- undrift: run on B."]


def test_a_hash_knows_options_likelihood_and_keepers_and_no_address() -> None:
    plain = fingerprint("roid", {}, "stream")
    changed = [{"stream_lr": 1e-4}, {"consistency": 2.0}, {"ensemble": 0.9}]
    assert len({plain, *(fingerprint("roid", change, "stream") for change in changed)}) == 4
    assert fingerprint("tent", {"layers": ()}, "stream") == fingerprint("tent", {"layers": []}, "stream")
    assert fingerprint("no-such-method", {}, "stream") == ""
    for name in methods.names():
        for loop in methods.get(name).loops:
            assert " at 0x" not in canonical(resolved(name, {}, loop))
            assert len(fingerprint(name, {}, loop)) == 12


def test_what_has_no_effect_is_no_other_method() -> None:
    assert fingerprint("tent", {"init_fraction": 0.5, "adapt_lr": 1.0}, "stream") == fingerprint("tent", {}, "stream")
    assert fingerprint("vmp", {"init_fraction": 0.5}, "stream") != fingerprint("vmp", {}, "stream")
    assert fingerprint("shot", {"stream_lr": 1.0}, "adapt") == fingerprint("shot", {}, "adapt")
    assert fingerprint("shot", {"norm_momentum": 0.5}, "adapt") != fingerprint("shot", {}, "adapt")


@pytest.mark.parametrize("name", ["online-c10", "online-c100"])
def test_committed_cells_are_finished_or_say_what_of_them_holds(name: str) -> None:
    bench, request = find(name), Request(results=ROOT / "benchmarks" / "results", fast=True)
    assert isinstance(bench, OnlineBenchmark)
    store = Store(request.results / name)
    states = {cell.row.name: store.state(cell) for cell in bench.shown(request) if store.shown(cell)}
    assert states
    for cell in bench.shown(request):
        record = store.shown(cell)
        if record is not None and store.state(cell) == "stale":
            assert record["note"].startswith("error only: ")
            assert not {"nll", "ece"} & record.keys()


def test_a_row_that_does_not_exist_is_named_with_a_suggestion() -> None:
    bench = find("online-c10")
    assert isinstance(bench, OnlineBenchmark)
    with pytest.raises(OptionError, match=r"no row or method 'vmp:papr' here \(did you mean 'vmp:paper'\?\)"):
        bench.cells(Request(only=("tent", "vmp:papr")))
    rows = [MethodRow("vmp:paper", "vmp:paper"), MethodRow("sigma-0", "vmp:paper", control=True)]
    with pytest.raises(OptionError, match="needed: one of vmp:paper, vmp, sigma-0"):
        chosen(rows, ("nothing",), None)
    with pytest.raises(OptionError, match="nothing"):
        find("offline").cells(Request(only=("nothing",)))  # type: ignore[union-attr]


def test_rows_that_started_from_different_networks_are_named() -> None:
    def record(network: str | None, seed: int = 0) -> dict[str, Any]:
        return {"setting": "a-b", "seed": seed} | ({} if network is None else {"source_network": network})

    rows = {"shot": [record("aa"), record("bb", 1)], "tent": [record("aa")], "vmp": [record("cc"), record("bb", 1)]}
    (line,) = several_sources(rows | {"before": [record(None)]})  # records of before do not say
    assert line == "- a-b, seed 0: not all of one source network: shot, tent (aa); vmp (cc)"
    assert several_sources({"shot": [record("aa")], "vmp": [record("aa")], "old": [record(None)]}) == []
    # A stream has one network for all seeds.
    (line,) = several_sources({"tent": [record("aa"), record("bb", 1), record("bb", 2)]}, a_seed=False)
    assert line == "- a-b: not all of one source network: tent (aa); tent (bb)"
