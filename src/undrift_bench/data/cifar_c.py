"""CIFAR-10-C and CIFAR-100-C (Hendrycks & Dietterich 2019) in Zenodo's layout: one .npy per corruption, and labels."""

from os import PathLike
from pathlib import Path

import numpy as np
import torch

from undrift._errors import DataError, OptionError
from undrift.images.corrupt import CORRUPTIONS, DEVELOPMENT, SEVERITIES
from undrift.images.domains import TensorDomain
from undrift.images.labels import read_labels
from undrift.images.preprocess import RAW, Preprocess
from undrift.images.sources import open_array
from undrift.images.tree import choose
from undrift_bench.data.cifar import CIFAR10_CLASSES, CIFAR100_CLASSES, check_labels
from undrift_bench.data.published_set import first_existing, layout_error

PUBLISHED = (*CORRUPTIONS, *DEVELOPMENT, "spatter")
"""The fifteen, and the four published beside them for choosing hyper-parameters."""


def cifar10_c(
    root: str | PathLike[str], corruption: str, severity: int = 5, *, preprocess: Preprocess = RAW
) -> TensorDomain:
    """Return CIFAR-10-C's images of one corruption and severity, in the order of CIFAR-10's test images.

    Args:
        root: holds CORRUPTION.npy and labels.npy, or CIFAR-10-C with them.
        severity: 1 to 5.
    """
    return _load(Path(root), "CIFAR-10-C", "2535967", corruption, severity, CIFAR10_CLASSES, preprocess)


def cifar100_c(
    root: str | PathLike[str], corruption: str, severity: int = 5, *, preprocess: Preprocess = RAW
) -> TensorDomain:
    """Return CIFAR-100-C's images of one corruption and severity, in the order of CIFAR-100's test images.

    Args:
        root: holds CORRUPTION.npy and labels.npy, or CIFAR-100-C with them.
        severity: 1 to 5.
    """
    return _load(Path(root), "CIFAR-100-C", "3555552", corruption, severity, CIFAR100_CLASSES, preprocess)


def check_corruption(corruption: str, severity: int) -> None:
    """Raise unless the corruption is a published one and its severity is 1 to 5."""
    choose(corruption, PUBLISHED, "corruption")
    if severity not in SEVERITIES:
        raise OptionError(f"severity {severity} does not exist; needed: 1 (mild) to 5 (severe). Choose one of these.")


def _load(
    root: Path,
    title: str,
    record: str,
    corruption: str,
    severity: int,
    class_names: tuple[str, ...],
    preprocess: Preprocess,
) -> TensorDomain:
    check_corruption(corruption, severity)
    origin = f"It comes from Zenodo, record {record}; `undrift corrupt` makes the same from {title.removesuffix('-C')}."
    layout = f"{corruption}.npy (five severities of 32×32×3 images, one after another) beside labels.npy"
    folder = root / title if (root / title).is_dir() else root
    place = first_existing([folder / f"{corruption}.npy"])
    if place is None or not (folder / "labels.npy").is_file():
        raise layout_error(folder, layout, origin)
    images, labels = open_array(place), read_labels(folder / "labels.npy")
    if images.shape[1:] != (32, 32, 3) or len(images) % len(SEVERITIES) or len(labels) != len(images):
        raise DataError(
            f"{place} has shape {images.shape} and labels.npy has {len(labels)} labels; needed: {layout}, as many "
            f"labels as images. {origin}"
        )
    part = len(images) // len(SEVERITIES)
    rows = slice((severity - 1) * part, severity * part)
    check_labels(labels, len(class_names), folder / "labels.npy", origin)
    return TensorDomain(
        f"{title} {corruption} {severity}",
        torch.from_numpy(np.array(images[rows])).permute(0, 3, 1, 2).contiguous(),
        torch.from_numpy(labels[rows].astype(np.int64)),
        class_names,
        preprocess,
    )
