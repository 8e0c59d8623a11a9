"""Every command from start to end, on a tiny network and tiny pictures."""

import csv
import importlib
import json
import tarfile
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import undrift
from faults import missing
from support import same

from .conftest import MODEL, NAMES, Run, leftovers


def rows(path: str | Path) -> list[dict[str, str]]:
    with Path(path).open(newline="") as file:
        return list(csv.DictReader(file))


def test_adapt_then_inspect_predict_evaluate_export(run: Run, work: Path) -> None:
    found = run("adapt", "target", *MODEL, "--out", "b.safetensors", "--epochs", "2", "--features", "norm", "--plot")
    assert found.code == 0, found.err
    assert "no sign of collapse" in found.out
    assert json.loads(Path("b.history.json").read_text())["verdict"]["collapsed"] is False
    assert Path("b.history.png").read_bytes().startswith(b"\x89PNG")
    file = undrift.inspect("b.safetensors")
    assert (file.classes, file.preprocess, file.source) == (
        NAMES,
        undrift.images.Preprocess(),
        "tiny_of_tests:make source.safetensors",
    )

    found = run("inspect", "b.safetensors", "--plot", "sigma.png", "--json")
    assert [row["layer"] for row in found.json["layers"]] == ["conv"]
    assert found.json["wrote"] == ["sigma.png"]

    found = run("predict", "target", *MODEL, "--domain", "b.safetensors", "--out", "a.csv", "--json")
    assert found.json["answered"] == 30
    table = rows("a.csv")
    assert list(table[0]) == ["path", "label", "probability", "entropy", "mutual_information"]
    assert sum(Path(row["path"]).parent.name == row["label"] for row in table) >= 25
    assert all(float(row["mutual_information"]) >= 0 for row in table)

    found = run(
        "evaluate", "--target", "target", *MODEL, "--domain", "b.safetensors", "--out", "r.json", "--plot", "r.png"
    )
    assert found.code == 0, found.err
    assert "target" in found.out
    right = sum(Path(row["path"]).parent.name == row["label"] for row in table)
    assert undrift.Report.load("r.json").results[0].scores.error == pytest.approx(1 - right / 30, abs=0.07)

    words = ("export", *MODEL, "--domain", "b.safetensors", "--out")
    found = run(*words, "net.safetensors")
    assert found.code == 0
    assert "kept from passes with noise" in found.err
    assert "kept from passes" not in run(*words, "own.safetensors", "--images", "target").err
    assert not same(load_file("own.safetensors"), load_file("net.safetensors"))
    found = run("predict", "target", "--model", MODEL[1], "--weights", "net.safetensors", "--json")
    mean = run("predict", "target", *MODEL, "--domain", "b.safetensors", "--samples", "0", "--json")
    assert any("kept from passes with noise" in text for text in mean.json["warnings"])
    assert found.json["answers"] == mean.json["answers"]  # the exported file knows its classes and preprocessing too
    assert load_file("net.safetensors").keys() == load_file("source.safetensors").keys()
    assert leftovers(work) == []


def test_answers_are_reproducible_and_may_abstain(run: Run, adapted: Path) -> None:
    words = ("predict", "target.npy", *MODEL, "--domain", adapted, "--json")
    first, again, other = (run(*words, "--seed", seed).json["answers"] for seed in ("3", "3", "4"))
    assert first == again != other
    threshold = sorted(row["probability"] for row in first)[10]
    found = run(*words, "--seed", "3", "--abstain-below", str(threshold)).json
    assert found["abstained"] == 10
    assert {row["label"] for row in found["answers"] if row["probability"] < threshold} == {"abstain"}
    assert found["answers"][0]["path"] == "target.npy[0]"
    cool = run(*words, "--temperature", "auto", "--samples", "2").json
    assert cool["temperature"] > 0


def test_fast_answers_have_one_temperature_for_all_images(run: Run, adapted: Path) -> None:
    words = ("predict", "target.npy", *MODEL, "--domain", adapted, "--batch-size", "10", "--json", "--mode", "fast")
    found = run(*words, "--samples", "6").json
    net = importlib.import_module("tiny_of_tests").make().eval()
    net.load_state_dict(load_file("source.safetensors"))
    model = undrift.load(net, adapted, generator=torch.Generator().manual_seed(0))
    batches = undrift.images.domain("target.npy").prepared(undrift.images.Preprocess()).named_batches(10)
    wanted = undrift.predict(model, batches, 6, generator=torch.Generator().manual_seed(0), mode="fast")
    assert [row["probability"] for row in found["answers"]] == wanted.probs.amax(1).tolist()
    assert [row["path"] for row in found["answers"]] == [f"target.npy[{i}]" for i in range(30)]
    assert found["answered"] == 30


def test_a_temperature_that_cannot_be_chosen_is_one(run: Run, adapted: Path) -> None:
    words = ("predict", "target", *MODEL, "--domain", adapted, "--json")  # mirrored, all images have the same answer
    found, plain = run(*words, "--temperature", "auto"), run(*words)
    assert (found.code, found.json["temperature"]) == (0, 1.0)
    assert found.json["answers"] == plain.json["answers"]
    (warning,) = found.json["warnings"]
    assert all(fact in warning for fact in ("no temperature between", "needed: ", "Temperature 1 is used"))
    assert "chosen by" not in found.err
    words = ("evaluate", "--target", "target", *MODEL, "--domain", str(adapted), "--temperature", "auto", "--json")
    assert "Temperature 1 is used" in run(*words).json["warnings"][0]


def test_images_as_people_have_them(run: Run, work: Path) -> None:
    whole = run("predict", "target", *MODEL, "--json").json["answers"]
    with tarfile.open("target.tar", "w") as tar:
        tar.add("target")
    Path("list.txt").write_text("\n".join(row["path"] for row in whole[:5]) + "\n")
    tarred, listed = (run("predict", path, *MODEL, "--json").json["answers"] for path in ("target.tar", "list.txt"))
    assert sorted(row["probability"] for row in tarred) == sorted(row["probability"] for row in whole)
    assert [row["label"] for row in listed] == [row["label"] for row in whole[:5]]
    printed = run("predict", whole[0]["path"], *MODEL)
    assert printed.out.splitlines()[0] == "path,label,probability,entropy,mutual_information"


def test_damaged_images_are_skipped_counted_and_named(run: Run, work: Path) -> None:
    for name in ("00", "07"):
        path = next(Path("target").rglob(f"{name}.png"))
        path.write_bytes(path.read_bytes()[:30])
    found = run("predict", "target", *MODEL, "--json").json
    assert (found["answered"], len(found["skipped"])) == (28, 2)
    assert any("00.png" in name for name in found["skipped"])
    assert any("2 of 30 images" in text for text in found["warnings"])
    assert "With --json they are all named, as `skipped`." in run("predict", "target", *MODEL).err
    found = run("adapt", "target", *MODEL, "--out", "b.safetensors", "--epochs", "1", "--json").json
    assert (found["images"], len(found["skipped"])) == (28, 2)
    found = run("evaluate", "--target", "target", *MODEL, "--json").json
    assert (found["results"][0]["scores"]["count"], len(found["skipped"])) == (28, 2)


def test_evaluate_generalized_and_continual(run: Run, adapted: Path) -> None:
    found = run("evaluate", "--target", "target", "--source", "source", *MODEL, "--domain", adapted, "--json").json
    assert found["setting"] == "generalized"
    assert 0 < found["summary"]["harmonic_of_means"] <= 1
    found = run(
        *("evaluate", "--target", "target", "--target", "target.npy", "--labels", "labels.npy", "--source", "source"),
        *(*MODEL, "--lr", "1e-3", "--batch-size", "10", "--json"),
    )
    assert (found.json["setting"], "forgetting" in found.json["summary"]) == ("continual", True)
    assert [r["domain"] for r in found.json["results"]] == ["source", "target", "target.npy", "source"]
    offline = run("evaluate", "--target", "target.npy", "--labels", "labels.npy", *MODEL, "--json").json
    assert offline["results"][0]["scores"]["count"] == 30
    assert "twice" in run("evaluate", "--target", "target", "--target", "target", *MODEL).err
    assert "0 --labels for 1 targets" in run("evaluate", "--target", "target.npy", *MODEL).err


def test_labels_follow_the_networks_class_names_not_the_alphabet(run: Run) -> None:
    # Sorted, the folders are blue, green, red; the network says red, green, blue.
    scores = run("evaluate", "--target", "source", *MODEL, "--json").json["results"][0]["scores"]
    assert scores["accuracy"] == 1.0


def test_options_reach_the_method(run: Run) -> None:
    found = run(
        *("adapt", "target", *MODEL, "--out", "b.safetensors", "--epochs", "1", "--likelihood", "entropy"),
        *("--preset", "released", "--init-fraction", "0.04", "--exclude", "head", "--no-norm-affine", "--lr", "1e-4"),
        *("--estimator", "drawn"),
    )
    assert found.code == 0, found.err
    wanted = undrift.preset("released").replace(
        init_fraction=0.04, exclude=("head",), norm_affine=False, adapt_lr=1e-4, estimator="drawn"
    )
    assert undrift.inspect("b.safetensors").options == wanted


def test_train_reads_a_tree_and_writes_what_adapt_needs(run: Run, work: Path) -> None:
    quick = ("--preset", "digits", "--epochs", "1", "--batch-size", "8", "--held-out", "0.2", "--quiet")
    for folder in NAMES:
        for path in Path("source", folder).iterdir():
            Image.open(path).resize((28, 28)).save(path)
    found = run("train", "source", *quick, "--out", "own.safetensors", "--json")
    assert found.code == 0, found.err
    assert found.json["wrote"][0] == "own.safetensors"
    assert run("inspect", "own.safetensors", "--json").json["network"] == "digits"
    found = run("predict", "source", "--weights", "own.safetensors", "--json")  # no --model: the file names it
    assert {row["label"] for row in found.json["answers"]} <= set(NAMES)
    assert found.json["warnings"] == []  # nor any preprocessing: it is in the file


def test_parquet_holds_what_the_csv_holds(run: Run) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra undrift[parquet]")
    assert run("predict", "target", *MODEL, "--out", "a.parquet", "--seed", "1").code == 0
    assert run("predict", "target", *MODEL, "--out", "a.csv", "--seed", "1").code == 0
    table = parquet.read_table("a.parquet").to_pydict()
    header, *lines = Path("a.csv").read_text().splitlines()
    assert list(table) == header.split(",")
    assert len(lines) == len(table["path"])
    for line, path, label in zip(lines, table["path"], table["label"], strict=True):
        assert line.split(",")[:2] == [path, label]


def test_parquet_needs_pyarrow_and_says_so(run: Run) -> None:
    with missing("pyarrow"):
        found = run("predict", "target", *MODEL, "--out", "a.parquet")
    assert (found.code, "undrift[parquet]" in found.err, Path("a.parquet").exists()) == (1, True, False)


KNOWS = """
import tiny_of_tests
from undrift.images.preprocess import Preprocess

def make():
    net = tiny_of_tests.make()
    net.preprocess = Preprocess(crop=8)
    return net
"""


def test_preprocessing_travels_and_a_mismatch_is_said_loudly(run: Run) -> None:
    own = (*MODEL[:6], "--mean", "0.5,0.5,0.5", "--std", "0.5,0.5,0.5", "--crop", "6")
    assert run("adapt", "target", *own, "--out", "b.safetensors", "--epochs", "1").code == 0
    silent = run("predict", "target", *MODEL[:6], "--domain", "b.safetensors", "--json").json
    assert silent["warnings"] == []  # the file knows
    Path("knows_of_tests.py").write_text(KNOWS)
    noted = run(
        "predict", "target", "--model", "knows_of_tests:make", *MODEL[2:6], "--domain", "b.safetensors", "--json"
    )
    assert noted.json["warnings"] == []  # it knows more than the network's package
    assert noted.json["answers"] == silent["answers"]
    assert "the file's is used: mean: (0.5, 0.5, 0.5) against" in noted.err
    loud = run("predict", "target", *MODEL[:6], "--domain", "b.safetensors", "--crop", "none", "--json").json
    assert "crop: 6 against None" in loud["warnings"][0]
    assert "is unknown; images are scaled" in run("predict", "target", *MODEL[:6], "--json").json["warnings"][0]
