"""CIFAR-10-C and CIFAR-100-C in Zenodo's layout."""

import numpy as np
import pytest
import torch

from undrift import DataError, OptionError
from undrift_bench import data


@pytest.fixture
def root(tmp_path):
    """Five severities of four images; severity s has pixels 10·s."""
    images = np.repeat(np.arange(1, 6, dtype=np.uint8) * 10, 4)[:, None, None, None] + np.zeros(
        (20, 32, 32, 3), np.uint8
    )
    images[..., 0] += 1
    np.save(tmp_path / "fog.npy", images)
    np.save(tmp_path / "labels.npy", np.tile([4, 3, 2, 1], 5))
    return tmp_path


@pytest.mark.parametrize(("load", "classes"), [(data.cifar10_c, 10), (data.cifar100_c, 100)])
def test_a_severity_is_its_fifth_of_the_file(root, load, classes):
    domain = load(root, "fog", 3)
    assert domain.images.shape == (4, 3, 32, 32)
    assert domain.images[0, :, 0, 0].tolist() == [31, 30, 30]
    assert domain.labels.tolist() == [4, 3, 2, 1]
    assert domain.labels.dtype == torch.int64
    assert len(domain.class_names) == classes


def test_the_usual_folder_name_may_be_left_out(root):
    folder = root / "CIFAR-10-C"
    folder.mkdir()
    for name in ("fog.npy", "labels.npy"):
        (root / name).rename(folder / name)
    assert len(data.cifar10_c(root, "fog")) == 4
    with pytest.raises(DataError, match=r"holds CIFAR-10-C; needed: fog\.npy .* record 3555552"):
        data.cifar100_c(root, "fog")


def test_names_and_severities_are_checked(root):
    with pytest.raises(OptionError, match=r"no corruption 'gausian_noise'; .*Did you mean 'gaussian_noise'\?"):
        data.cifar10_c(root, "gausian_noise")
    with pytest.raises(OptionError, match="severity 6 does not exist"):
        data.cifar10_c(root, "fog", 6)


def test_partial_folders_get_three_facts(root):
    with pytest.raises(DataError, match=r"holds fog\.npy, labels\.npy; needed: snow\.npy .* Zenodo, record 2535967"):
        data.cifar10_c(root, "snow")
    np.save(root / "labels.npy", np.zeros(19, int))
    with pytest.raises(DataError, match=r"shape \(20, 32, 32, 3\) and labels\.npy has 19 labels; needed"):
        data.cifar10_c(root, "fog")
    (root / "labels.npy").unlink()
    with pytest.raises(DataError, match=r"beside labels\.npy"):
        data.cifar10_c(root, "fog")


def test_cut_pickled_and_wrong_files_are_refused(root):
    content = (root / "fog.npy").read_bytes()
    (root / "fog.npy").write_bytes(content[:5000])
    with pytest.raises(DataError, match=r"fog\.npy cannot be read as an array .* cut short"):
        data.cifar10_c(root, "fog")
    (root / "fog.npy").write_bytes(content)
    np.save(root / "labels.npy", np.array([{}] * 20), allow_pickle=True)
    with pytest.raises(DataError, match=r"labels\.npy cannot be read"):
        data.cifar10_c(root, "fog")
    np.save(root / "labels.npy", np.zeros(20))
    with pytest.raises(DataError, match=r"float64 of shape \(20,\); needed: integers"):
        data.cifar10_c(root, "fog")
    np.save(root / "labels.npy", np.full(20, 10))
    with pytest.raises(DataError, match="labels from 10 to 10; needed: 0 to 9"):
        data.cifar10_c(root, "fog")
