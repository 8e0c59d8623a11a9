"""CIFAR in its three layouts; a tampered pickle is refused and does nothing."""

import pickle
import struct

import numpy as np
import pytest
import torch
from PIL import Image

from undrift import DataError
from undrift_bench import data


class Payload:
    """Runs when it is unpickled."""

    fired = False

    def __reduce__(self):
        return (setattr, (Payload, "fired", True))


@pytest.fixture
def records():
    return np.random.default_rng(0).integers(0, 256, (6, 3072), dtype=np.uint8)


LABELS = [3, 0, 9, 1, 1, 7]


def python2_pickle(records, labels):
    """Return what Python 2 wrote: byte strings for text and pixels, and numpy's old module names."""
    raw, shape = records.tobytes(), struct.pack("<BH", ord("M"), records.shape[1])
    return (
        b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01"
        + bytes([ord("K"), len(records)])
        + shape
        + b"\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T"
        + struct.pack("<i", len(raw))
        + raw
        + b"tbU\x06labels]("
        + b"".join(bytes([ord("K"), label]) for label in labels)
        + b"eu."
    )


def test_the_oldest_and_the_newest_pickles_are_read(tmp_path, records):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    old = python2_pickle(records, LABELS)
    assert np.array_equal(pickle.loads(old, encoding="bytes")[b"data"], records)  # the recipe above is a real pickle
    for content in (
        old,
        pickle.dumps({b"data": records, b"labels": LABELS}, protocol=2),
        pickle.dumps({"data": np.asfortranarray(records), "labels": LABELS}, protocol=4),
    ):
        (folder / "test_batch").write_bytes(content)
        for root in (tmp_path, folder):
            domain = data.cifar10(root)
            assert torch.equal(domain.images, torch.from_numpy(records).view(6, 3, 32, 32))
            assert domain.labels.tolist() == LABELS
            assert domain.class_names[3] == "cat"


def test_training_batches_are_joined_in_order(tmp_path, records):
    for index in range(1, 6):
        content = {"data": records[:2] // index, "labels": [index, 0]}
        (tmp_path / f"data_batch_{index}").write_bytes(pickle.dumps(content, protocol=2))
    assert data.cifar10(tmp_path, train=True).labels.tolist() == [1, 0, 2, 0, 3, 0, 4, 0, 5, 0]
    (tmp_path / "data_batch_4").unlink()
    with pytest.raises(DataError, match=r"holds data_batch_1, .*; needed: also data_batch_4\. .*Krizhevsky"):
        data.cifar10(tmp_path, train=True)


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps({"data": Payload(), "labels": []}, protocol=2),
        b"\x80\x02cos\nsystem\nU\x04true\x85R.",
        b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\nU\x01b\x85Ru.",
        pickle.dumps([1, 2]),
        b"no pickle",
        b"",
    ],
)
def test_a_tampered_pickle_is_refused_and_not_run(tmp_path, content):
    (tmp_path / "test_batch").write_bytes(content)
    with pytest.raises(DataError, match=r"test_batch cannot be read \(.+\); needed: a CIFAR batch with nothing but"):
        data.cifar10(tmp_path)
    assert not Payload.fired


def test_arrays_of_objects_are_not_built(tmp_path):
    (tmp_path / "test_batch").write_bytes(pickle.dumps({"data": np.array([{}, {}]), "labels": [0, 1]}, protocol=2))
    with pytest.raises(DataError, match="not of whole numbers"):
        data.cifar10(tmp_path)


def test_cifar100_takes_fine_labels(tmp_path, records):
    (tmp_path / "cifar-100-python").mkdir()
    content = {"data": records, "fine_labels": [99, 0, 1, 2, 3, 4], "coarse_labels": [1] * 6}
    (tmp_path / "cifar-100-python" / "test").write_bytes(pickle.dumps(content, protocol=2))
    domain = data.cifar100(tmp_path)
    assert domain.labels.tolist() == [99, 0, 1, 2, 3, 4]
    assert (domain.class_names[0], domain.class_names[99]) == ("apple", "worm")
    with pytest.raises(
        DataError, match=r"holds cifar-100-python; needed: cifar-10-batches-py/ or cifar-10-batches-bin/"
    ):
        data.cifar10(tmp_path)


@pytest.mark.parametrize(
    ("load", "folder", "label_bytes"),
    [(data.cifar10, "cifar-10-batches-bin", 1), (data.cifar100, "cifar-100-binary", 2)],
)
def test_binary_batches(tmp_path, records, load, folder, label_bytes):
    (tmp_path / folder).mkdir()
    labels = np.array(LABELS, np.uint8)[:, None]
    content = np.concatenate([*([labels * 0 + 19] * (label_bytes - 1)), labels, records], 1).tobytes()
    path = tmp_path / folder / ("test_batch.bin" if label_bytes == 1 else "test.bin")
    path.write_bytes(content)
    domain = load(tmp_path)
    assert torch.equal(domain.images, torch.from_numpy(records).view(6, 3, 32, 32))
    assert domain.labels.tolist() == LABELS
    path.write_bytes(content[:-5])
    with pytest.raises(
        DataError, match=rf"has {len(content) - 5} bytes; needed: whole records of {3072 + label_bytes}"
    ):
        load(tmp_path)


def test_labels_out_of_range_are_refused(tmp_path, records):
    (tmp_path / "test_batch.bin").write_bytes(np.insert(records[:1], 0, 10, axis=1).tobytes())
    with pytest.raises(DataError, match="has labels from 10 to 10; needed: 0 to 9"):
        data.cifar10(tmp_path)


def test_sheets_are_cut_row_by_row(tmp_path):
    sheet = np.zeros((3200, 3200, 3), np.uint8)
    sheet[:32, 32:64] = (1, 2, 3)  # tile 1
    sheet[32:64, :32, 1] = 9  # tile 100
    Image.fromarray(sheet).save(tmp_path / "test.webp", "PNG", compress_level=1)
    np.save(tmp_path / "test_labels.npy", np.zeros(9999, np.uint8))
    domain = data.cifar10(tmp_path)
    assert domain.images.shape == (9999, 3, 32, 32)
    assert domain.images[1, :, 5, 5].tolist() == [1, 2, 3]
    assert domain.images[100, :, 0, 0].tolist() == [0, 9, 0]
    (tmp_path / "test_labels.npy").unlink()
    with pytest.raises(DataError, match=r"holds test\.webp; needed: also test_labels\.npy"):
        data.cifar10(tmp_path)


def test_a_sheet_of_another_size_is_refused(tmp_path):
    Image.new("RGB", (64, 32)).save(tmp_path / "test.webp", "PNG")
    np.save(tmp_path / "test_labels.npy", np.zeros(2, np.uint8))
    with pytest.raises(DataError, match="is 64×32 pixels; needed: a sheet of 3200×3200"):
        data.cifar100(tmp_path)
    (tmp_path / "test.webp").write_bytes(b"cut")
    with pytest.raises(DataError, match=r"test\.webp cannot be read .* Copy it again"):
        data.cifar100(tmp_path)


def test_real_sheets(shared):
    cifar10, cifar100 = data.cifar10(shared), data.cifar100(shared)
    assert (len(cifar10), len(cifar100)) == (10000, 9999)
    assert cifar10.labels.bincount().tolist() == [1000] * 10
    assert list(cifar100.class_names) == (shared / "cifar100" / "classes.txt").read_text().split()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": [0.5] * 6}, "no whole numbers as labels"),
        ({"labels": ["cat"] * 6}, "no whole numbers as labels"),
        ({"labels": [[1]] * 6}, "no whole numbers as labels"),
        ({"labels": [2**80] * 6}, "no whole numbers as labels"),
        ({"data": np.zeros((6, 3072), np.int64)}, r"data of int64, shape \(6, 3072\)"),
        ({"data": np.zeros((6, 3071), np.uint8)}, r"data of uint8, shape \(6, 3071\)"),
        ({"data": 3}, "no array of data"),
    ],
)
def test_what_is_no_batch_of_pixels_and_labels_is_refused(tmp_path, records, change, message):
    content = {"data": records, "labels": LABELS, **change}
    (tmp_path / "test_batch").write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(DataError, match=rf"test_batch holds data, labels, .*{message}.*; needed: data of N×3072"):
        data.cifar10(tmp_path)


def test_a_pickle_cannot_change_what_reads_it(tmp_path):
    from undrift_bench.data import unpickle

    before = dict(unpickle._STAND_INS)
    # BUILD with attributes on the function that decodes text: they would outlive the file.
    attributes = b"N}U\x0c__defaults__U\x06latin1\x85s\x86b"
    (tmp_path / "test_batch").write_bytes(b"\x80\x02c_codecs\nencode\n" + attributes + b".")
    with pytest.raises(DataError, match=r"cannot be read \(it sets attributes"):
        data.cifar10(tmp_path)
    assert before == unpickle._STAND_INS
    assert not hasattr(before["_codecs", "encode"], "__dict__")
