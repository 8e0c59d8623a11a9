"""`undrift predict --pack`: each image by the pack that knows it, and the column that says which."""

import csv
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from cli.conftest import MODEL, Run, pictures


@pytest.fixture
def folder(run: Run, work: Path) -> Path:
    """Return a folder with packs of a dim and of a bright domain, and images of three domains in mixed.npy."""
    domains = {name: make(*pictures(36, 5)) for name, make in MADE.items()}
    (work / "packs").mkdir()
    for name in ("night", "snow"):
        np.save(f"{name}.npy", domains[name])
        how = ("--method", "undrift-light", "--epochs", "1", "--out", f"packs/{name}.safetensors")
        found = run("adapt", f"{name}.npy", *MODEL, *how)
        assert found.code == 0, found.err
    np.save("mixed.npy", np.concatenate([domain[:5] for domain in domains.values()]))
    return work / "packs"


MADE = {
    "home": lambda images, _: images.permute(0, 2, 3, 1).numpy(),
    "night": lambda images, _: (images // 8).permute(0, 2, 3, 1).numpy(),
    "snow": lambda images, _: (200 + images // 8).permute(0, 2, 3, 1).numpy(),
}


def test_each_image_names_its_pack(run: Run, folder: Path) -> None:
    found = run("predict", "mixed.npy", *MODEL, "--pack", folder, "--out", "a.csv", "--json")
    assert found.code == 0, found.err
    with Path("a.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["pack"] for row in rows] == ["source"] * 5 + ["night"] * 5 + ["snow"] * 5
    assert found.json["packs"] == {"source": 5, "night": 5, "snow": 5}
    one = run("predict", "mixed.npy", *MODEL, "--pack", folder / "night.safetensors", "--json").json
    assert Counter(answer["pack"] for answer in one["answers"])["night"] >= 5
    printed = run("predict", "mixed.npy", *MODEL, "--pack", folder)
    assert printed.out.splitlines()[0] == "path,label,probability,entropy,mutual_information,pack"


def test_who_comes_last_counts_the_answers_of_all_parts(run: Run, folder: Path) -> None:
    words = ("predict", "mixed.npy", *MODEL, "--pack", folder, "--batch-size", "4", "--out", "a.csv", "--parts", "3")
    first, last = run(*words), run(*words)
    assert (first.code, last.code) == (0, 0), last.err
    assert last.out == first.out
    counted = [line.split()[-1] for line in last.out.splitlines() if line.startswith(("source ", "night ", "snow "))]
    assert counted == ["5", "5", "5"]
    assert run(*words, "--json").json["packs"] == {"source": 5, "night": 5, "snow": 5}


def test_a_damaged_pack_is_named_and_left_out(run: Run, folder: Path) -> None:
    whole = (folder / "snow.safetensors").read_bytes()
    (folder / "a.safetensors").write_bytes(whole[:-3])
    found = run("predict", "mixed.npy", *MODEL, "--pack", folder, "--json")
    assert found.code == 0
    assert "a.safetensors is damaged" in found.err
    assert found.json["packs"] == {"source": 5, "night": 5, "snow": 5}
    for words, code, said in (
        (("--pack", folder, "--domain", folder / "night.safetensors"), 2, "--domain was given beside --pack"),
        (("--pack", folder, "--mode", "fast"), 2, "--mode fast was given beside --pack"),
        (("--pack", "nothing.safetensors"), 1, "there is no file nothing.safetensors"),
    ):
        found = run("predict", "mixed.npy", *MODEL, *words)
        assert found.code == code
        assert said in found.err
