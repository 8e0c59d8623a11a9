"""ImageNet's validation images and ImageNet-C: synset trees, index trees, tars, and what is missing in them."""

import tarfile

import pytest

from undrift import DataError, OptionError
from undrift.images import IMAGENET, Preprocess
from undrift_bench import data

SYNSETS = [f"n{index:08d}" for index in range(1000)]
SMALL = Preprocess(resize=(8, 8))


def empty_tree(root, names):
    for name in names:
        (root / name).mkdir(parents=True)
        (root / name / "1.JPEG").touch()


def test_synsets_are_labelled_by_their_place(tmp_path):
    empty_tree(tmp_path / "val", SYNSETS)
    for root in (tmp_path, tmp_path / "val"):
        domain = data.imagenet(root)
        assert len(domain) == len(domain.class_names) == 1000
        assert domain.preprocess == IMAGENET
        for source, label in zip(domain.sources[:20], domain.labels[:20].tolist(), strict=True):
            assert SYNSETS[label] in source.name
    (tmp_path / "val" / SYNSETS[5] / "1.JPEG").unlink()
    with pytest.raises(DataError, match=r"\(999 folders with images\); needed: .* all 1000 synsets.* image-net"):
        data.imagenet(tmp_path)


def test_index_folders_are_their_own_labels(tmp_path, plant):
    plant(tmp_path / "tree", ["0", "2", "10", "999"])
    domain = data.imagenet(tmp_path / "tree", seed=None, preprocess=SMALL)
    assert domain.labels.tolist() == [0, 2, 10, 999]
    with tarfile.open(tmp_path / "val5k.tar", "w") as tar:
        tar.add(tmp_path / "tree", ".")
    archive = data.imagenet(tmp_path, seed=None)
    assert archive.labels.tolist() == [0, 2, 10, 999]
    assert archive.preprocess == IMAGENET.without_resize()
    assert [source.name[-6:] for source in archive.sources] == [source.name[-6:] for source in domain.sources]
    assert data.imagenet(tmp_path / "val5k.tar").labels.tolist() != [0, 2, 10, 999]


def test_the_flat_folder_as_downloaded_is_explained(tmp_path, picture):
    (tmp_path / "ILSVRC2012_val_00000001.JPEG").write_bytes(picture(0))
    with pytest.raises(
        DataError, match=r"holds ILSVRC2012_val_00000001\.JPEG \(0 folders.*moved into a folder for each"
    ):
        data.imagenet(tmp_path)
    with pytest.raises(DataError, match="there is no"):
        data.imagenet(tmp_path / "nowhere")


@pytest.mark.parametrize("group", ["", "weather"])
def test_imagenet_c_gives_every_corruption_the_same_order(tmp_path, plant, group):
    for corruption in ("fog", "snow"):
        plant(tmp_path / group / corruption / "5", ["3", "7", "11"], 2, "JPEG")
    fog, snow = (data.imagenet_c(tmp_path, corruption) for corruption in ("fog", "snow"))
    assert fog.labels.tolist() == snow.labels.tolist()
    assert [source.name.replace("fog", "snow") for source in fog.sources] == [source.name for source in snow.sources]
    assert fog.preprocess.resize is None
    assert fog.name == "ImageNet-C fog 5"


def test_imagenet_c_says_what_is_missing(tmp_path):
    with pytest.raises(DataError, match=r"is empty; needed: fog/4/SYNSET/IMAGE, .*record 2235448"):
        data.imagenet_c(tmp_path, "fog", 4)
    empty_tree(tmp_path / "fog" / "5", SYNSETS[:3])
    with pytest.raises(DataError, match=r"\(3 folders with images\); needed"):
        data.imagenet_c(tmp_path, "fog")
    with pytest.raises(OptionError, match="Did you mean 'fog'"):
        data.imagenet_c(tmp_path, "fogg")


def test_real_val5k_is_balanced_and_shuffled(shared):
    domain = data.imagenet(shared)
    assert domain.labels.bincount().tolist() == [5] * 1000
    assert len(set(domain.labels[:100].tolist())) > 80
    assert domain.select(range(4)).hold().images.shape == (4, 3, 224, 224)
