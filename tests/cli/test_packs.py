"""`undrift packs` lists a folder, damaged files among the others; `undrift export --pack` writes one as a network."""

from pathlib import Path

import pytest
import torch

import undrift
from cli.conftest import MODEL, Run

WIDE = """
from torch import nn

def make():
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
                         nn.Linear(256, 32), nn.Linear(32, 3))
"""


def test_packs_are_listed_and_damaged_ones_named(run: Run, adapted: Path, work: Path) -> None:
    folder = work / "packs"
    folder.mkdir()
    (folder / "night.safetensors").write_bytes(adapted.read_bytes())
    (folder / "source.safetensors").write_bytes(Path("source.safetensors").read_bytes())
    (folder / "notes.txt").write_text("no pack")
    found = run("packs", folder)
    assert (found.code, found.err) == (0, "")
    header, _, row = found.out.splitlines()
    assert header.split() == ["name", "bytes", "made", "images", "estimate"]
    file = undrift.inspect(adapted)
    assert row.split()[:4] == ["night", f"{file.size:,}", file.created, "30"]
    assert "no sign of collapse" in row

    (folder / "broken.safetensors").write_bytes(adapted.read_bytes()[:-1])
    (folder / "other.safetensors").write_bytes(adapted.read_bytes())
    found = run("packs", folder, "--json")
    assert found.code == 1
    assert [pack["name"] for pack in found.json["packs"]] == ["night", "other"]
    assert found.json["packs"][0]["images"] == 30
    assert found.json["others"] == ["source.safetensors"]
    assert "needed: a whole domain file" in found.json["damaged"]["broken.safetensors"]
    assert found.json["warnings"] == list(found.json["damaged"].values())
    assert [line.split()[-1] for line in found.err.splitlines() if line.startswith("broken ")] == ["damaged"]


def test_two_packs_of_one_name_are_said(run: Run, work: Path) -> None:
    folder = work / "packs"
    folder.mkdir()
    model = undrift.perturb(torch.nn.Linear(2, 2))
    for file in "ab":
        undrift.save(model, folder / f"{file}.safetensors", name="night")
    found = run("packs", folder)
    assert found.code == 0
    assert "a.safetensors and b.safetensors are both called night; needed: a name for each" in found.err


@pytest.mark.parametrize(("folder", "match"), [("nowhere", "is no folder"), ("target", "holds no pack (0 other")])
def test_a_folder_without_packs_gets_three_facts(run: Run, folder: str, match: str) -> None:
    found = run("packs", folder)
    assert found.code == 1
    assert match in found.err
    assert "needed:" in found.err


def test_a_pack_is_exported_as_an_onnx_model(run: Run, adapted: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    words = ("export", *MODEL, "--pack", adapted, "--images", "target", "--out")
    assert run(*words, "net.onnx", "--example", "target", "--json").json["format"] == "onnx"
    assert run(*words, "net.pt2", "--example", "target", "--json").json["format"] == "torch.export"
    x = torch.rand(5, 3, 8, 8)
    session = runtime.InferenceSession("net.onnx")
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    wanted = torch.export.load("net.pt2").module()(x)
    torch.testing.assert_close(torch.from_numpy(found), wanted, rtol=0, atol=1e-4)


def test_how_a_pack_holds_trained_weights_is_an_option(run: Run, work: Path) -> None:
    Path("wide_of_tests.py").write_text(WIDE)
    words = ("adapt", "target", "--model", "wide_of_tests:make", "--epochs", "1", "--method", "shot", "--features", "5")
    sizes = {}
    for scheme in ("exact", "ternary", "4-bit"):
        found = run(*words, "--out", f"{scheme}.safetensors", "--pack-mean", scheme)
        assert found.code == 0, found.err
        sizes[scheme] = Path(f"{scheme}.safetensors").stat().st_size
    assert sizes["ternary"] < sizes["4-bit"] < sizes["exact"]
    assert run("inspect", "4-bit.safetensors", "--json").json["mean"]["5.weight"]["levels"] > 15
    found = run(*words, "--out", "c.safetensors", "--pack-mean", "half")
    assert (found.code, "mean='half' is no way to store" in found.err) == (2, True)
