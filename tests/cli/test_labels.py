"""Which output a folder is, by its name or its number; and what a data set by name gets of the preprocessing."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from undrift import DataError
from undrift.cli.image_arguments import Reader
from undrift.cli.label_arguments import check_label_range, labelled_images
from undrift.images import IMAGENET, Domain, FileDomain, Preprocess
from undrift.images.preprocess import RAW

from .conftest import MODEL, NAMES, Outcome, Run

UNNAMED = (*MODEL[:4], *MODEL[6:])
Plant = Callable[..., Path]


@pytest.fixture
def plant(tmp_path: Path) -> Plant:
    """Writes a tree with an image in each folder, grey as its place."""

    def plant(*folders: str, under: str = "tree") -> Path:
        for place, name in enumerate(folders):
            (tmp_path / under / name).mkdir(parents=True)
            Image.new("RGB", (8, 8), (place,) * 3).save(tmp_path / under / name / "a.png")
        return tmp_path / under

    return plant


def by_folder(tree: Path, classes: tuple[str, ...] | None = None) -> tuple[Domain, dict[str, int]]:
    """Return a tree as labelled images, and the label that each folder got."""
    domain = labelled_images(str(tree), Reader(Path(), RAW), classes, None)
    assert domain.labels is not None
    return domain, dict(
        zip((Path(s.name).parent.name for s in domain.sources), domain.labels.tolist(), strict=True)  # type: ignore[union-attr]
    )


def scores(found: Outcome) -> dict[str, float]:
    assert found.code == 0, found.err
    kept: dict[str, float] = found.json["results"][0]["scores"]
    return kept


def test_a_part_of_numbered_folders_is_scored_as_the_same_outputs(run: Run) -> None:
    Path("source/red").rename("red")
    named = scores(run("evaluate", "--target", "source", *MODEL, "--json"))
    for number, name in enumerate(NAMES[1:], 1):
        Path("source", name).rename(Path("source", str(number)))
    assert scores(run("evaluate", "--target", "source", *UNNAMED, "--json")) == pytest.approx(named)
    assert named["accuracy"] > 0.5


def test_folders_that_count_from_one_are_named_first(run: Run) -> None:
    named = scores(run("evaluate", "--target", "source", *MODEL, "--json"))
    for number, name in enumerate(NAMES, 1):
        Path("source", name).rename(Path("source", str(number)))
    found = run("evaluate", "--target", "source", *UNNAMED)
    assert found.code == 1
    assert "labels from 1 to 3; the network has 3 outputs; needed: labels from 0 to 2, one per output" in found.err
    assert "They seem to count from 1: name the classes of folders 1 to 3 with --classes" in found.err
    Path("ones.txt").write_text("1\n2\n3\n", encoding="utf-8-sig")
    assert scores(run("evaluate", "--target", "source", *UNNAMED, "--classes", "ones.txt", "--json")) == pytest.approx(
        named
    )


def test_a_number_is_a_label(plant: Plant) -> None:
    domain, labels = by_folder(plant("3", "7"))
    assert labels == {"3": 3, "7": 7}
    check_label_range(domain, 10)
    with pytest.raises(DataError, match=r"labels from 3 to 7; the network has 5 outputs; .* Take the network"):
        check_label_range(domain, 5)
    with pytest.raises(DataError, match=r"labels from 3 to 7; the network has 7 outputs; .* count from 1"):
        check_label_range(domain, 7)


@pytest.mark.parametrize("folders", [("03", "07"), ("3", "x7"), ("3", "9" * 30)])
def test_other_names_have_to_be_as_many_as_the_outputs(plant: Plant, folders: tuple[str, ...]) -> None:
    domain, labels = by_folder(plant(*folders))
    assert sorted(labels.values()) == [0, 1]
    check_label_range(domain, 2)
    with pytest.raises(DataError, match=r"labels from 0 to 1, 2 classes; the network has 10 outputs"):
        check_label_range(domain, 10)


def test_numbers_are_matched_to_classes_as_numbers_not_by_place(plant: Plant) -> None:
    tree = plant("01", "02", "03")
    assert by_folder(tree, ("3", "1", "2"))[1] == {"01": 1, "02": 2, "03": 0}
    with pytest.raises(DataError, match=r"has classes that the network does not \(03; 3 against 3: 0, 1, 2"):
        by_folder(tree, ("0", "1", "2"))


@pytest.mark.parametrize(
    ("given", "crop", "resize"), [(False, 224, None), (False, 192, None), (False, 240, 256), (True, 224, 256)]
)
def test_a_data_set_that_was_resized_before_is_not_resized_again(
    plant: Plant, given: bool, crop: int, resize: int | None
) -> None:
    root = plant("3", under="fog/5").parents[1]
    wanted = Preprocess(IMAGENET.mean, IMAGENET.std, resize=256, crop=crop)
    reader = Reader(root, wanted, given)
    expected = Preprocess(IMAGENET.mean, IMAGENET.std, resize, crop)
    assert reader.images("imagenet_c:fog:5").preprocess == expected
    assert labelled_images("imagenet_c:fog:5", reader, None, None).preprocess == expected


@pytest.mark.parametrize(
    "words",
    [
        ("predict", "imagenet_c:fog:5"),
        ("stream", "imagenet_c:fog:5", "--answers", "o.csv"),
        ("adapt", "imagenet_c:fog:5", "--out", "o.safetensors"),
        ("evaluate", "--target", "imagenet_c:fog:5"),
    ],
)
def test_a_resize_on_the_command_line_is_done_all_the_same(
    run: Run, plant: Plant, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    plant("0", under="fog/5")

    def prepared(_: FileDomain, preprocess: Preprocess) -> Domain:
        raise DataError(f"resized to {preprocess.resize}, cropped to {preprocess.crop}")

    monkeypatch.setattr(FileDomain, "prepared", prepared)
    assert "resized to 256, cropped to 224" in run(*words, *MODEL, "--resize", "256", "--crop", "224").err


@pytest.mark.parametrize(
    ("labels", "facts"),
    [
        (np.zeros(30, np.float32), r"holds float32 of shape \(30,\); needed: integers.*reshape\(-1\)\.astype\(int\)"),
        (np.array(["red"] * 30), r"holds text of shape \(30,\); needed: integers.*place in the network's class names"),
        (np.zeros((30, 3)), r"holds float64 of shape \(30, 3\); needed: integers.*labels\.argmax\(1\)"),
        (np.zeros((30, 1), np.int64), r"holds int64 of shape \(30, 1\); needed: integers of shape \(N,\).*reshape"),
    ],
)
def test_labels_of_another_kind_are_told_how_to_become_numbers(run: Run, labels: Any, facts: str) -> None:
    np.save("other.npy", labels)
    found = run("evaluate", "--target", "target.npy", "--labels", "other.npy", *MODEL)
    assert (found.code, "Copy it again" in found.err) == (1, False)
    assert re.search(facts, found.err), found.err
