"""Office-31, Office-Home and PACS in their published layouts, whole, partial and wrong."""

import tarfile

import pytest
import torch

from undrift import DataError, OptionError, UndriftWarning
from undrift.images import Preprocess
from undrift.images.tree import read_classes
from undrift_bench import data
from undrift_bench.data.office_31 import CLASSES as OFFICE_31
from undrift_bench.data.officehome import CLASSES as OFFICE_HOME
from undrift_bench.data.pacs_domains import PACS

SMALL = Preprocess(resize=(8, 8))
LOADERS = {"office31": (data.office31, OFFICE_31), "office_home": (data.office_home, OFFICE_HOME)}
LOADERS["pacs"] = (data.pacs, PACS.class_names)


def test_class_lists_are_sorted_and_complete():
    assert {name: len(classes) for name, (_, classes) in LOADERS.items()} == {
        "office31": 31,
        "office_home": 65,
        "pacs": 7,
    }
    assert all(list(classes) == sorted(set(classes)) for _, classes in LOADERS.values())


@pytest.mark.parametrize(
    ("benchmark", "folder", "domain"),
    [
        ("office31", "amazon/images", "amazon"),
        ("office31", "webcam", "webcam"),
        ("office31", "domain_adaptation_images/dslr/images", "dslr"),
        ("office_home", "Art", "art"),
        ("office_home", "Real World", "real_world"),
        ("office_home", "OfficeHomeDataset_10072016/RealWorld", "real_world"),
        ("pacs", "art_painting", "art_painting"),
        ("pacs", "kfold/sketch", "sketch"),
    ],
)
def test_published_layouts_are_read(tmp_path, plant, benchmark, folder, domain):
    load, classes = LOADERS[benchmark]
    plant(tmp_path / folder, classes, 2)
    with pytest.warns(UndriftWarning, match=rf"has {2 * len(classes)} images; .* publishes \d+ for {domain}"):
        read = load(tmp_path, domain, seed=None)
    assert read.class_names == classes
    assert read.labels.tolist() == [label for label in range(len(classes)) for _ in range(2)]
    assert [source.name.split("/")[-2] for source in read.sources[::2]] == list(classes)


def test_files_sorted_by_class_are_shuffled_with_a_fixed_seed(tmp_path, plant):
    plant(tmp_path / "photo", PACS.class_names, 3)
    with pytest.warns(UndriftWarning):
        first, again, other = (data.pacs(tmp_path, "photo", seed=seed) for seed in (0, 0, 1))
    assert first.sources == again.sources != other.sources
    assert first.labels.tolist() != sorted(first.labels.tolist())
    for source, label in zip(first.sources, first.labels.tolist(), strict=True):
        assert f"/{PACS.class_names[label]}/" in source.name


@pytest.mark.filterwarnings("ignore::undrift._errors.UndriftWarning")
def test_a_tar_is_the_same_domain(tmp_path, plant):
    plant(tmp_path / "tree" / "photo", PACS.class_names, 2)
    with tarfile.open(tmp_path / "photo.tar", "w") as tar:
        tar.add(tmp_path / "tree" / "photo", "photo")
    trees = [data.pacs(root, "photo", preprocess=SMALL).hold() for root in (tmp_path, tmp_path / "tree")]
    assert torch.equal(trees[0].images, trees[1].images)
    assert torch.equal(trees[0].labels, trees[1].labels)


@pytest.mark.parametrize(
    ("members", "classes"),
    [
        (("dog/1.png", "cat/2.png"), {"dog": 1, "cat": 1}),
        (("./photo/dog/1.png", "./photo/cat/2.png"), {"dog": 1, "cat": 1}),
        (("photo/dog/left/1.png", "photo/dog/right/2.png", "photo/cat/3.png"), {"dog": 2, "cat": 1}),
        (("/srv/photo/dog/1.png", "/srv/photo/cat/2.png"), {"dog": 1, "cat": 1}),
        (("dog/1.png", "dog/2.png"), {"dog": 2}),
        (("photo/dog/1.png",), {"dog": 1}),
        (("dog/1.png", "dog/left/2.png"), {"dog": 2}),
        (("dog/1.png", "dog/left/2.png", "cat/3.png"), {"dog": 2, "cat": 1}),
        (("photo/dog/1.png", "photo/dog/2.png", "photo/cat/1.png", "photo/preview.png"), {"dog": 2, "cat": 1}),
        (("a/photo/dog/1.png", "a/photo/cat/1.png", "a/photo/2.png", "a/3.png", "4.png"), {"dog": 1, "cat": 1}),
        (("photo/dog/1.png", "photo/2.png"), {"photo": 2}),
        (("dog/1.png", "cat/2.png", "cover.png"), {"dog": 1, "cat": 1}),
        (("dog/1.png", "cat/2.png", ".trash/3.png", "cat/.old/4.png"), {"dog": 1, "cat": 1}),
        ((".data/dog/1.png", ".data/cat/2.png", ".data/.trash/3.png"), {"dog": 1, "cat": 1}),
        (("cover.png",), {}),
    ],
)
def test_the_classes_of_a_tar_are_its_first_folders_below_those_that_all_share(tmp_path, members, classes):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in members:
            tar.addfile(tarfile.TarInfo(name))
    assert {name: len(sources) for name, sources in read_classes(tmp_path / "a.tar").items()} == classes


def test_a_tree_and_its_tar_have_the_same_classes(tmp_path, plant):
    root = plant(tmp_path / "tree", ["dog/left", "dog/right", "cat", ".trash", "cat/.old"])
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(root, ".")
    folder, archive = (read_classes(place) for place in (root, tmp_path / "a.tar"))
    assert {name: len(sources) for name, sources in folder.items()} == {"cat": 1, "dog": 2}
    assert {name: [str(root / source.member) for source in sources] for name, sources in archive.items()} == {
        name: [source.path for source in sources] for name, sources in folder.items()
    }


def test_a_missing_class_is_named(tmp_path, plant):
    plant(tmp_path / "photo", [*PACS.class_names[1:], "cat"])
    message = (
        r"has 7 class folders, 1 \(dog\) missing and 1 \(cat\) unknown; needed: photo/CLASS/IMAGE .* \(Li et al\. 2017"
    )
    with pytest.raises(DataError, match=message):
        data.pacs(tmp_path, "photo")


def test_an_empty_class_counts_as_missing(tmp_path, plant):
    root = plant(tmp_path / "photo", PACS.class_names)
    (root / "horse" / "0.png").unlink()
    with pytest.raises(DataError, match=r"1 \(horse\) missing"):
        data.pacs(tmp_path, "photo")


@pytest.mark.parametrize("benchmark", LOADERS)
def test_a_wrong_folder_gets_three_facts(tmp_path, benchmark):
    load, _ = LOADERS[benchmark]
    (tmp_path / "holiday").mkdir()
    domain = {"office31": "amazon", "office_home": "art", "pacs": "photo"}[benchmark]
    with pytest.raises(DataError, match=r"holds holiday; needed: .*/CLASS/IMAGE with \d+ classes.* It comes from"):
        load(tmp_path, domain)
    with pytest.raises(DataError, match=r"there is no .*nowhere; needed"):
        load(tmp_path / "nowhere", domain)


def test_a_misspelt_domain_gets_a_suggestion(tmp_path):
    with pytest.raises(OptionError, match=r"no PACS domain 'Art painting'; .*Did you mean 'art_painting'\?"):
        data.pacs(tmp_path, "Art painting")


def test_real_pacs_is_whole_and_decodes(shared):
    photo = data.pacs(shared / "pacs", "photo")
    assert len(photo) == 1670
    held = photo.select(range(12)).hold()
    assert held.images.shape == (12, 3, 224, 224)
    assert len(held.skipped) == 0
    assert torch.equal(held.labels, photo.labels[:12])
