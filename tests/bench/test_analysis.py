"""The analyses: what each part varies, and what is taken over instead of run again."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import undrift
import undrift_bench.zoo
from undrift import OptionError
from undrift_bench.bench import Request, Store
from undrift_bench.bench.analysis.benchmark import Analysis
from undrift_bench.bench.analysis.parts import BETAS, DRAWS_IN_TEST, SCALES, STAGES, parts
from undrift_bench.bench.analysis.run import same_run
from undrift_bench.bench.harness.cell import MethodRow
from undrift_bench.bench.harness.run import run
from undrift_bench.bench.offline.benchmark import Offline

NAMES = ["sigma", "prior", "sharing", "layers", "schemes", "samples", "beta"]


def tiny(folder: Path, **more: Any) -> Request:
    return Request(**{"results": folder, "tiny": True, "seeds": 1, "device": "cpu", **more})


def quiet(_: str) -> None:
    pass


def test_each_figure_of_the_paper_is_a_part():
    found = parts()
    assert list(found) == NAMES
    for part in found.values():
        loops = {"pacs": "adapt", "cifar10-c": "stream", "cifar100-c": "stream"}
        for trial in part.trials:
            undrift.methods.get(trial.row.method, loops[trial.where]).build(trial.row.settings)
        keys = [(t.where, t.task, t.row.name) for t in part.trials]
        assert len(set(keys)) == len(keys)
    beta = {t.value: t.row.settings["beta"] for t in found["beta"].trials if t.curve == "SHOT"}
    assert list(beta.values()) == list(BETAS)
    assert (min(BETAS), max(BETAS)) == (0.1, 2.0)
    isotropic = [t.row.settings["prior_scale"] for t in found["prior"].trials if t.curve == "isotropic"]
    assert tuple(isotropic) == SCALES


@pytest.mark.slow
@pytest.mark.parametrize(("where", "network"), [("pacs", "shot_resnet50"), ("cifar10-c", "wrn40_2")])
def test_what_is_left_out_is_there(where, network):
    net = undrift_bench.zoo.build(network, 7)
    model = undrift.perturb(net)
    for stage in STAGES[where]:
        without = undrift.perturb(model.remove(), exclude=(stage,))
        assert 0 < len(without.noises()) < len(model.noises())
        model_again = without.remove()
        assert model_again is net


def test_every_cell_has_a_file_of_its_own():
    keys = [cell.key for cell in Analysis().cells(Request())]
    assert len(set(keys)) == len(keys)
    assert all(key.endswith(".s0.float32") for key in keys)
    assert Analysis().cells(Request(tier="A")) == []


def test_parts_and_data_are_chosen_by_name():
    bench = Analysis()
    cells = bench.cells(Request(only=("prior", "beta"), settings=("pacs",)))
    assert {cell.setting for cell in cells} == {"prior sketch-photo", "beta cartoon-art_painting"}
    other = bench.cells(Request(only=("beta",), extra={"task": "photo-cartoon", "epochs": "5"}))
    assert {cell.setting for cell in other} == {"beta 5 epochs photo-cartoon"}
    assert {cell.images for cell in other} == {2344}
    with pytest.raises(OptionError, match="there is no part 'depth'"):
        bench.cells(Request(only=("depth",)))
    with pytest.raises(OptionError, match="there is no task 'photo-photo'"):
        bench.cells(Request(extra={"task": "photo-photo"}))
    with pytest.raises(OptionError, match="epochs='0'"):
        bench.cells(Request(extra={"epochs": "0"}))


def test_rows_are_the_same_run_however_they_are_written():
    plain = MethodRow("a", "vmp-shot:paper")
    assert same_run(plain, MethodRow("b", "vmp-shot", {"beta": 0.3, "train_samples": 1}))
    assert not same_run(plain, MethodRow("b", "vmp-shot", {"beta": 0.5}))
    assert not same_run(plain, MethodRow("b", "vmp-shot", {"train_samples": 2}))
    assert not same_run(MethodRow("a", "shot"), MethodRow("b", "shot-bn"))
    assert same_run(MethodRow("a", "eta"), MethodRow("b", "eta"))


@pytest.mark.slow
def test_sigma_and_samples_come_from_one_network_and_are_taken_over(tmp_path):
    bench, request = Analysis(), tiny(tmp_path, settings=("pacs",), only=("sigma", "sharing", "samples"))
    outcome = run(bench, request, quiet, quiet=True)
    assert outcome.failed == 0
    records = json.loads((tmp_path / "analysis.json").read_text())["cells"]
    looked = next(r for r in records if r["setting"].startswith("sigma"))
    assert list(looked["sigma"]) == list(looked["a_distance"])
    assert all(0 <= d <= 2 for d in looked["a_distance"].values())
    assert list(looked["by_samples"]) == [str(n) for n in DRAWS_IN_TEST]
    # The noise of this untrained network is too small to matter: any number of draws says what ten say.
    assert looked["by_samples"]["10"]["nll"] == pytest.approx(looked["nll"], abs=0.02)
    kernel, weight = (next(r for r in records if r["row"] == f"one-a-{what}") for what in ("kernel", "weight"))
    assert kernel["taken_from"].startswith("analysis/tiny.sigma_sketch-photo")
    assert kernel["accuracy"] == looked["accuracy"]
    assert "taken_from" not in weight
    assert weight["learnables"] > kernel["learnables"]
    assert looked["by_samples"]["10"].keys() == {"accuracy", "nll", "ece", "aurc", "augrc"}
    text = outcome.text
    assert text.count("| AURC × 100 |") == 3  # of the parts that were run, and of no other
    for header, _, *lines in (part.splitlines() for part in re.findall(r"^\|.*?(?=\n[^|]|\n\n)", text, re.M | re.S)):
        assert {line.count(" | ") for line in lines} == {header.count(" | ")}
    assert "| PACS sketch-photo | in test | 50 |" in text
    assert "| CIFAR-10-C | in test | 50 | not run |" in text
    assert {path.name for path in outcome.wrote} >= {
        "analysis-sigma.png",
        "analysis-sharing.png",
        "analysis-samples.png",
    }
    assert "analysis-beta.png" not in {path.name for path in outcome.wrote}


@pytest.mark.slow
def test_what_offline_has_run_is_not_run_again(tmp_path):
    request = tiny(tmp_path, settings=("sketch-photo",), only=("shot",))
    run(Offline(), request, quiet, quiet=True)
    (cell,) = Offline().cells(request)
    known = Store(tmp_path / "offline").finished(cell)
    bench = Analysis()
    run(bench, replace(request, only=("beta", "schemes"), settings=("pacs",)), quiet, quiet=True)
    records = json.loads((tmp_path / "analysis.json").read_text())["cells"]
    taken = {r["row"]: r for r in records if r.get("taken_from", "").startswith("offline/")}
    assert set(taken) == {"shot-0.3", "all-weights"}
    assert taken["shot-0.3"]["accuracy"] == known["accuracy"]
    assert taken["shot-0.3"]["benchmark"] == "analysis"


@pytest.mark.slow
def test_what_is_known_is_taken_over_whatever_the_deadline(tmp_path):
    request = tiny(tmp_path, settings=("sketch-photo",), only=("shot",))
    run(Offline(), request, quiet, quiet=True)
    (cell,) = Offline().cells(request)
    numbers = Store(tmp_path / "offline").finished(cell)
    # A finished cell of this part says that the others take years; the known one takes nothing.
    bench, request = Analysis(), replace(request, only=("beta",), settings=("pacs",))
    store, cells = Store(tmp_path / "analysis"), bench.cells(request)
    (first,) = (cell for cell in cells if cell.row.name == "shot-0.1")
    store.put(first, {k: v for k, v in numbers.items() if k not in cell.identity} | {"seconds": 1e9})
    assert store.finished(first)
    outcome = run(bench, replace(request, deadline=0.0), quiet, quiet=True)
    assert (outcome.ran, outcome.failed) == (1, 0)
    assert [cell.row.name for cell in cells if store.finished(cell)] == ["shot-0.1", "shot-0.3"]


@pytest.mark.slow
def test_streams_run_on_corruptions(tmp_path):
    bench, request = Analysis(), tiny(tmp_path, settings=("cifar100-c",), only=("schemes",))
    outcome = run(bench, request, quiet, quiet=True)
    assert (outcome.ran, outcome.failed) == (6, 0)
    records = json.loads((tmp_path / "analysis.json").read_text())["cells"]
    vmp = next(r for r in records if r["row"] == "perturbation-vmp")
    assert vmp["settings"]["stream_lr"] == 7e-5
    assert 0 <= vmp["accuracy"] <= 1
    assert "error" not in vmp
    assert set(vmp["domains"]) == {"gaussian_noise", "contrast"}
    assert (tmp_path / "analysis-schemes.png").stat().st_size > 1000


def test_nothing_run_is_said():
    text = Analysis().markdown(Store(Path("nowhere")), Request())
    assert text.count("not run") > 60
    assert Analysis().figures(Store(Path("nowhere")), Request()) == {}
