"""A checksum tells whether a domain is the one that a run began with."""

import shutil
from pathlib import Path

import numpy as np
import torch

from undrift.images import FileDomain, TensorDomain
from undrift.images.content import checksum
from undrift.images.sources import ArraySource, FileSource


def files(folder: Path) -> FileDomain:
    return FileDomain("files", tuple(FileSource(str(path)) for path in sorted(folder.rglob("*.png"))))


def test_pixels_shape_and_order_count() -> None:
    images = torch.arange(5000 * 4, dtype=torch.int64).to(torch.uint8).view(5000, 1, 2, 2)
    domain = TensorDomain("a", images)
    assert checksum(domain) == checksum(TensorDomain("b", images.clone()))
    changed = images.clone()
    changed[4999, 0, 1, 1] += 1
    turned = images.transpose(2, 3)
    sums = {checksum(TensorDomain("a", other)) for other in (images, changed, turned, images.flip(0), images[1:])}
    assert len(sums) == 5


def test_a_copy_of_a_folder_is_the_same_and_another_size_is_not(tmp_path: Path) -> None:
    for name in ("x/a.png", "y/b.png"):
        (tmp_path / "one" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "one" / name).write_bytes(b"12")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    first = checksum(files(tmp_path / "one"))
    assert checksum(files(tmp_path / "two")) == first
    (tmp_path / "two/x/a.png").write_bytes(b"123")
    assert checksum(files(tmp_path / "two")) != first
    (tmp_path / "one/x/a.png").rename(tmp_path / "one/y/a.png")
    assert checksum(files(tmp_path / "one")) != first


def test_missing_files_rows_of_an_array_and_no_files_have_one_too(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((3, 2, 2), np.uint8))
    rows = FileDomain("rows", tuple(ArraySource(str(tmp_path / "a.npy"), row) for row in range(3)))
    gone = FileDomain("gone", (FileSource("nowhere.png"),))
    sums = {checksum(domain) for domain in (rows, rows.select([1]), gone, FileDomain("none", ()))}
    assert len(sums) == 4
