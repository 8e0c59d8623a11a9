"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009): torchvision's pickled folders, the binary batches, or sheets of tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch

from undrift._errors import DataError
from undrift.images.domains import TensorDomain
from undrift.images.labels import read_labels
from undrift.images.preprocess import RAW, Preprocess
from undrift.images.sources import UNREADABLE, decode, pillow
from undrift_bench.data.published_set import layout_error
from undrift_bench.data.unpickle import Array, read_batch

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_CIFAR100_CLASSES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly
camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup
dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower
leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid
otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray
road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
wardrobe whale willow_tree wolf woman worm
"""
CIFAR100_CLASSES = tuple(_CIFAR100_CLASSES.split())

ORIGIN = (
    "The python and binary versions come from the authors' page of CIFAR (Krizhevsky 2009): unpack them as they are."
)
PIXELS = 3 * 32 * 32
SHEET = 100  # tiles a side


@dataclass(frozen=True)
class _Layout:
    """Where each version of a CIFAR keeps its files, for one part (train or test)."""

    title: str
    class_names: tuple[str, ...]
    pickled: tuple[str, tuple[str, ...]]
    binary: tuple[str, tuple[str, ...]]
    sheets: tuple[str, tuple[str, ...]]
    labels: str
    label_key: str
    label_bytes: int


def cifar10(root: str | PathLike[str], *, train: bool = False, preprocess: Preprocess = RAW) -> TensorDomain:
    """Return CIFAR-10's 10,000 test images, or its 50,000 training images.

    Args:
        root: holds cifar-10-batches-py, cifar-10-batches-bin or sheets (test.webp), or is one of these folders.
    """
    batches = tuple(f"data_batch_{i}" for i in range(1, 6)) if train else ("test_batch",)
    layout = _Layout(
        title="CIFAR-10",
        class_names=CIFAR10_CLASSES,
        pickled=("cifar-10-batches-py", batches),
        binary=("cifar-10-batches-bin", tuple(f"{name}.bin" for name in batches)),
        sheets=("cifar10", tuple(f"train{i}.webp" for i in range(5)) if train else ("test.webp",)),
        labels="train_labels.npy" if train else "test_labels.npy",
        label_key="labels",
        label_bytes=1,
    )
    return _load(Path(root), layout, train, preprocess)


def cifar100(root: str | PathLike[str], *, train: bool = False, preprocess: Preprocess = RAW) -> TensorDomain:
    """Return CIFAR-100's 10,000 test images, or its 50,000 training images, with fine labels.

    Args:
        root: holds cifar-100-python, cifar-100-binary or sheets (test.webp), or is one of these folders.
    """
    part = "train" if train else "test"
    layout = _Layout(
        title="CIFAR-100",
        class_names=CIFAR100_CLASSES,
        pickled=("cifar-100-python", (part,)),
        binary=("cifar-100-binary", (f"{part}.bin",)),
        sheets=("cifar100", tuple(f"train{i}.webp" for i in range(5)) if train else ("test.webp",)),
        labels=f"{part}_labels.npy",
        label_key="fine_labels",
        label_bytes=2,
    )
    return _load(Path(root), layout, train, preprocess)


def check_labels(labels: Array | Sequence[int], classes: int, path: Path, origin: str) -> None:
    """Raise if a label is not one of the classes."""
    low, high = (int(np.min(labels)), int(np.max(labels))) if len(labels) else (0, 0)
    if low < 0 or high >= classes:
        raise DataError(f"{path} has labels from {low} to {high}; needed: 0 to {classes - 1}. {origin}")


def _load(root: Path, layout: _Layout, train: bool, preprocess: Preprocess) -> TensorDomain:
    for (folder, files), reader in (
        (layout.pickled, _read_pickled),
        (layout.binary, _read_binary),
        (layout.sheets, _read_sheets),
    ):
        for place in (root / folder, root):
            if not any((place / file).is_file() for file in files):
                continue
            missing = [file for file in files if not (place / file).is_file()]
            if missing:
                raise layout_error(place, f"also {', '.join(missing)}", ORIGIN)
            images, labels = reader(place, files, layout)
            check_labels(labels, len(layout.class_names), place, ORIGIN)
            return TensorDomain(
                f"{layout.title} {'train' if train else 'test'}",
                torch.from_numpy(images),
                torch.from_numpy(labels.astype(np.int64)),
                layout.class_names,
                preprocess,
            )
    (pickled, files), (binary, _), (_, sheets) = layout.pickled, layout.binary, layout.sheets
    raise layout_error(root, f"{pickled}/ or {binary}/ with {files[0]}, or {sheets[0]} beside {layout.labels}", ORIGIN)


def _read_pickled(folder: Path, files: Sequence[str], layout: _Layout) -> tuple[Array, Array]:
    images, labels = [], []
    for file in files:
        batch = read_batch(folder / file)
        data, numbers = batch.get("data"), batch.get(layout.label_key)
        if not isinstance(data, np.ndarray) or not _whole(numbers) or not _pixels(data, len(numbers)):
            found = f"data of {data.dtype}, shape {data.shape}" if isinstance(data, np.ndarray) else "no array of data"
            raise DataError(
                f"{folder / file} holds {', '.join(sorted(batch)) or 'nothing'}, {found}, and "
                f"{'' if _whole(numbers) else 'no '}whole numbers as {layout.label_key}; needed: data of N×{PIXELS} in "
                f"uint8 and N {layout.label_key}. {ORIGIN}"
            )
        images.append(data.reshape(-1, 3, 32, 32))
        labels.append(np.array(numbers, dtype=np.int64))
    return np.concatenate(images), np.concatenate(labels)


def _whole(numbers: Any) -> TypeGuard[list[int]]:
    return isinstance(numbers, list) and all(type(number) is int and abs(number) < 2**63 for number in numbers)


def _pixels(data: Array, count: int) -> bool:
    return data.dtype == np.uint8 and data.shape == (count, PIXELS)


def _read_binary(folder: Path, files: Sequence[str], layout: _Layout) -> tuple[Array, Array]:
    record, parts = layout.label_bytes + PIXELS, []
    for file in files:
        content = np.fromfile(folder / file, np.uint8)
        if not len(content) or len(content) % record:
            raise DataError(
                f"{folder / file} has {len(content)} bytes; needed: whole records of {record} bytes, "
                f"{10000 * record} for 10,000 images. It is cut short or another version: copy it again. {ORIGIN}"
            )
        parts.append(content.reshape(-1, record))
    records = np.concatenate(parts)
    # CIFAR-100 writes the coarse label first, then the fine one
    return records[:, layout.label_bytes :].reshape(-1, 3, 32, 32), records[:, layout.label_bytes - 1]


def _read_sheets(folder: Path, files: Sequence[str], layout: _Layout) -> tuple[Array, Array]:
    side = SHEET * 32
    if not (folder / layout.labels).is_file():
        raise layout_error(
            folder, f"also {layout.labels}", "The labels belong beside the sheets they were written with."
        )
    labels = read_labels(folder / layout.labels)
    pillow()
    tiles = []
    for file in files:
        try:
            sheet = decode((folder / file).read_bytes(), RAW).numpy()
        except UNREADABLE as error:
            raise DataError(
                f"{folder / file} cannot be read ({error}); needed: a picture of {side}×{side} pixels. Copy it again."
            ) from error
        if sheet.shape != (3, side, side):
            raise DataError(
                f"{folder / file} is {sheet.shape[2]}×{sheet.shape[1]} pixels; needed: a sheet of {side}×{side}, "
                f"{SHEET}×{SHEET} tiles of 32×32. Copy it again, or use another version. {ORIGIN}"
            )
        tiles.append(sheet.reshape(3, SHEET, 32, SHEET, 32).transpose(1, 3, 0, 2, 4).reshape(-1, 3, 32, 32))
    images = np.concatenate(tiles)
    if not 0 <= len(images) - len(labels) < SHEET:
        raise DataError(
            f"{folder / layout.labels} has shape {labels.shape} for {len(images)} tiles; needed: a label a tile, the "
            "last tiles may be empty. Take labels and sheets from the same place."
        )
    return images[: len(labels)], labels
