"""What a cell needs before it runs, what it warns of, and which network is asked about clean images afterwards."""

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import undrift
from prepared_support import head_of
from undrift import UndriftWarning, methods
from undrift.cli import main
from undrift.keep import Moments
from undrift.options import answering_draws
from undrift_bench.bench import Cell, MethodRow, Request, Store, find
from undrift_bench.bench.harness.networks import tiny_network
from undrift_bench.bench.harness.run import hearing, run
from undrift_bench.bench.harness.tiny_parts import TinyParts
from undrift_bench.bench.offline.rows import offline_rows
from undrift_bench.bench.online.benchmark import OnlineBenchmark
from undrift_bench.bench.online.rows import online_rows

FLAGS = ["bench", "online-c10", "--tiny", "--seeds", "1", "--device", "cpu", "--quiet"]


def tiny(folder: Path, *only: str, **extra: str) -> Request:
    return Request(results=folder, tiny=True, only=only, seeds=1, device="cpu", extra=extra)


def online() -> OnlineBenchmark:
    found = find("online-c10")
    assert isinstance(found, OnlineBenchmark)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("method", "part"), [("ttt", "head"), ("bacs", "posterior")])
def test_a_method_without_its_trained_part_is_not_run(method: str, part: str, tmp_path: Path) -> None:
    said: list[str] = []
    real = replace(tiny(tmp_path, method), tiny=False, networks=("wrn40_2",))
    outcome = run(online(), real, said.append, quiet=True)
    assert (outcome.ran, outcome.failed, outcome.left) == (0, 0, 1)
    assert said[0].endswith(f"Give it with --set {part}=FILE, one network at a time (--networks wrn40_2).")
    outcome = run(online(), tiny(tmp_path, method, **{part: str(tmp_path / "none")}), said.append, quiet=True)
    assert (outcome.ran, outcome.left) == (0, 1)
    assert "is no file" in said[-1]
    assert said[-1].endswith(f"Give it with --set {part}=FILE.")  # --networks tiny would be refused


@pytest.mark.slow
def test_a_trial_runs_methods_whose_parts_are_not_trained(tmp_path: Path) -> None:
    request = tiny(tmp_path, "ttt", "bacs")
    outcome = run(online(), request, lambda _: None, quiet=True)
    assert (outcome.ran, outcome.failed, outcome.left) == (2, 0, 0)
    for cell, part in zip(online().cells(request), ("posterior", "head"), strict=True):
        record = Store(tmp_path / "online-c10").finished(cell)
        assert record is not None
        assert record["trained"][part].startswith(f"untrained-{part}.safetensors ")
    parts = TinyParts(tiny_network().load(Request(tiny=True)))
    tensors = load_file(parts.file("posterior"))
    assert all(bool((tensor > 0).all()) for name, tensor in tensors.items() if name.startswith("var."))
    folder = parts.folder
    del parts
    assert not folder.exists()


@pytest.mark.slow
def test_a_trained_part_is_taken_from_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = tiny_network().load(Request(tiny=True))
    head, posterior = tmp_path / "head.safetensors", tmp_path / "posterior.safetensors"
    save_file({name: t.contiguous() for name, t in head_of(net).state_dict().items()}, head)
    moments = Moments(net)
    for _ in range(2):
        moments.add(net)
    moments.save(posterior)
    given = ["--set", f"head={head}", "--set", f"posterior={posterior}", "--results", str(tmp_path), "--json"]
    assert main([*FLAGS, *given, "--only", "ttt,bacs"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ran"], found["failed"]) == (2, 0)
    for cell in online().cells(tiny(tmp_path, "ttt", "bacs")):
        record = Store(tmp_path / "tiny" / "online-c10").finished(cell)
        assert record is not None
        assert not any("untrained" in message for message in record["warnings"])
        assert len(record["trained"]) == 1


def test_rows_say_what_their_readers_have_to_know(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notes = {row.name: row.note for row in online_rows("cifar10") if row.note}
    assert "every corruption from the source" in notes["ttt"]
    assert "CIFAR-10-C itself" in notes["tent-ft"]
    doubled = next(row for row in online_rows("cifar10") if row.name == "vmp-roid-consistency-2")
    assert "CIFAR-10-C itself" in doubled.why
    assert main([*FLAGS, "--results", str(tmp_path), "--only", "ttt,tent", "--list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"] == {"ttt": notes["ttt"]}
    text = online().markdown(Store(tmp_path), Request(results=tmp_path))
    assert f"- ttt: {notes['ttt']}" in text


class Warns:
    """A benchmark whose one cell warns, many times."""

    name = "warning"

    def cells(self, request: Request) -> list[Cell]:
        return [Cell("warning", "net", "main", MethodRow("tent", "tent"), 0, 10, request.precision)]

    shown = cells

    def prepare(self, request: Request) -> Callable[[Cell, Any], Mapping[str, Any]]:
        def run_cell(cell: Cell, bar: Any) -> Mapping[str, Any]:
            for _ in range(3):
                warnings.warn("COLLAPSED: one class", UndriftWarning, stacklevel=2)
            return {"error": 0.5}

        return run_cell

    def markdown(self, store: Store, request: Request) -> str:
        from undrift_bench.bench.harness.table import footnotes

        return "\n".join(footnotes({"tent": store.all(self.cells(request))}))

    def figures(self, store: Store, request: Request) -> dict[str, Callable[[Path], int]]:
        return {}


def test_what_a_cell_warns_of_is_in_its_record_and_under_its_table(tmp_path: Path) -> None:
    request = Request(results=tmp_path, device="cpu")
    outcome = run(Warns(), request, lambda _: None, quiet=True)
    (record,) = Store(tmp_path / "warning").all(Warns().cells(request))
    assert record["warnings"] == ["COLLAPSED: one class"]
    assert outcome.text == "- tent warned: COLLAPSED: one class"


def test_warnings_of_others_go_their_way_and_many_are_few() -> None:
    heard: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with hearing(heard):
            warnings.warn("old", DeprecationWarning, stacklevel=1)
            for number in range(9):
                warnings.warn(f"batch {number}", UndriftWarning, stacklevel=1)
    assert [str(w.message) for w in caught] == ["old"]
    assert heard == [*(f"batch {number}" for number in range(5)), "and 4 more warnings"]


def test_clean_images_are_asked_as_the_stream_was() -> None:
    drawn = {
        name: answering_draws(methods.get(name).options) for name in ("vmp:paper", "vmp:released", "vmp-roid", "tent")
    }
    assert drawn == {"vmp:paper": 10, "vmp:released": 1, "vmp-roid": 0, "tent": 0}
    assert answering_draws(methods.get("vmp").options.replace(answer="after")) == 1


@pytest.mark.slow
def test_the_mean_network_is_asked_where_the_mean_network_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    original = undrift.predict

    def counted(model: Any, images: Any, samples: Any = None, **how: Any) -> Any:
        asked.append(samples)
        return original(model, images, samples, **how)

    monkeypatch.setattr(undrift, "predict", counted)
    for row, samples in (("vmp-roid", 0), ("vmp:paper", 10)):
        asked.clear()
        request = tiny(tmp_path, row)
        run(online(), request, lambda _: None, quiet=True)
        (record,) = Store(tmp_path / "online-c10").all(online().cells(request))
        assert record["clean_samples"] == samples
        assert set(asked) == {samples}


def test_the_control_without_noise_has_no_noise_in_either_table() -> None:
    rows = {row.name: row for row in [*online_rows("cifar10"), *offline_rows()]}
    for name in ("vmp-sigma-0", "vmp-shot-sigma-0"):
        settings = rows[name].settings
        assert (settings["layers"], settings["test_samples"]) == ((), 0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(4, 2)
    )
    parts = methods.get("vmp-shot:paper").build(rows["vmp-shot-sigma-0"].settings)
    assert not undrift.perturb(net, parts.options.replace(frozen=(), fast=())).noises()
