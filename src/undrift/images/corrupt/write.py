"""Write CIFAR-C and ImageNet-C in their published layouts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from os import PathLike
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from undrift._errors import DataError
from undrift.images.content import files_checksum
from undrift.images.corrupt.apply import check_images, corrupt
from undrift.images.corrupt.constants import CORRUPTIONS, SEVERITIES
from undrift.images.corrupt.files import (
    Written,
    check_names,
    note_origin,
    note_skipped,
    progress,
    whole_file,
    whole_folders,
)
from undrift.images.domains import FileDomain, TensorDomain
from undrift.images.sources import pillow

BATCH = 256
JPEG_QUALITY = 85
"""ImageNet-C's: every published picture has been through JPEG at this quality, whatever its corruption."""


def write_cifar_c(
    domain: TensorDomain,
    folder: str | PathLike[str],
    names: Sequence[str] = CORRUPTIONS,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    frost: str | PathLike[str] | None = None,
    quiet: bool = False,
) -> Written:
    """Write NAME.npy (the five severities one after another, uint8 5N×32×32×3) and labels.npy (5N), as on Zenodo.

    A file appears when it is complete; an existing one is not made again.

    Args:
        domain: the clean test images, such as `undrift_bench.data.cifar10(root)`.
        device: where the corruptions are computed; a CPU and a GPU draw different noise.
        frost: as for `corrupt`.
        quiet: draw no progress bar.
    """
    check_names(names, frost)
    images, place = domain.images, Path(folder)
    if images.dtype != torch.uint8 or domain.labels is None:
        raise DataError(
            f"{domain.name} has {images.dtype} images and {'no' if domain.labels is None else 'its'} labels; needed: "
            "uint8 images with labels. Load it with `undrift_bench.data.cifar10` or `cifar100`."
        )
    check_images(images)
    content = hashlib.sha256(images.cpu().numpy().tobytes()).hexdigest()[:16]
    note_origin(
        place,
        {"source": domain.name, "images": len(images), "content": content, **_made_with(names, seed, device, frost)},
    )
    labels = np.tile(domain.labels.cpu().numpy().astype(np.uint8), len(SEVERITIES))
    made, kept, bar = [], [], progress(quiet)
    if not (place / "labels.npy").exists():
        with whole_file(place / "labels.npy") as file:
            np.save(file, labels)
    for name in names:
        path = place / f"{name}.npy"
        if path.exists():
            kept.append(path.name)
            continue
        on_device = images.to(device)
        stack = np.empty((len(SEVERITIES), len(images), *images.shape[2:], 3), dtype=np.uint8)
        for severity in bar(SEVERITIES, name, len(SEVERITIES)):
            corrupted = corrupt(on_device, name, severity, seed, frost=frost)
            stack[severity - 1] = corrupted.permute(0, 2, 3, 1).cpu().numpy()
        with whole_file(path) as file:
            np.save(file, stack.reshape(-1, *stack.shape[2:]))
        made.append(path.name)
    return Written(place, tuple(made), tuple(kept))


def write_imagenet_c(
    domain: FileDomain,
    folder: str | PathLike[str],
    names: Sequence[str] = CORRUPTIONS,
    *,
    severities: Sequence[int] = SEVERITIES,
    seed: int = 0,
    device: torch.device | str = "cpu",
    frost: str | PathLike[str] | None = None,
    workers: int | None = None,
    quiet: bool = False,
) -> Written:
    """Write NAME/SEVERITY/CLASS/FILE.JPEG at quality 85, as published.

    A severity's folder appears when it is complete; an existing one is not made again. Images are numbered in the order
    of class and file. Those that cannot be read are left out and named.

    Args:
        domain: the clean images, of `undrift_bench.data.imagenet`, say; its framing (resize 256, crop 224) is applied.
        device: where the corruptions are computed; a CPU and a GPU draw different noise.
        frost: as for `corrupt`.
        workers: processes that decode, as for `domain.batches`.
        quiet: draw no progress bar.
    """
    check_names(names, frost)
    place, (domain, files) = Path(folder), _sorted_files(domain)
    framing = domain.preprocess.to_dict()
    note_origin(
        place,
        {
            "source": domain.name,
            "images": len(files),
            "content": hashlib.sha256("\n".join(files).encode(errors="surrogateescape")).hexdigest()[:16],
            "paths and sizes": files_checksum(domain.sources),
            "framing": {key: framing[key] for key in ("resize", "crop", "interpolation")},
            **_made_with(names, seed, device, frost),
        },
    )
    made, kept, skipped, bar = [], [], note_skipped(place, ()), progress(quiet)
    for name in names:
        kept += [f"{name}/{severity}" for severity in severities if (place / name / str(severity)).exists()]
        missing = [severity for severity in severities if f"{name}/{severity}" not in kept]
        if not missing:
            continue
        with (
            whole_folders([place / name / str(severity) for severity in missing]) as partials,
            ThreadPoolExecutor(torch.get_num_threads()) as pool,
        ):
            for first, images, rows in bar(_read(domain, device, workers), name, -(-len(files) // BATCH)):
                for severity, partial in zip(missing, partials, strict=True):
                    corrupted = corrupt(images, name, severity, seed, first, frost=frost)
                    pixels = corrupted.permute(0, 2, 3, 1).cpu().numpy()
                    paths = [partial / files[first + row] for row in rows]
                    list(pool.map(_save_jpeg, paths, [pixels[row] for row in rows]))
            # Before the folders get their names: a run that finds them must know what they lack.
            skipped = note_skipped(place, (path for path in files if not (partials[0] / path).exists()))
        made += [f"{name}/{severity}" for severity in missing]
    return Written(place, tuple(made), tuple(kept), skipped)


def _made_with(
    names: Sequence[str], seed: int, device: torch.device | str, frost: str | PathLike[str] | None
) -> dict[str, str | int]:
    """Return what determines the noise, which finished and new files must share."""
    pictures = "imagecorruptions" if frost is None else str(Path(frost).resolve())
    how: dict[str, str | int] = {"seed": seed, "device": torch.device(device).type}
    return how | ({"frost": pictures} if "frost" in names else {})


def _sorted_files(domain: FileDomain) -> tuple[FileDomain, list[str]]:
    """Return the domain in the order of class and file, and the path CLASS/FILE.JPEG of each image."""
    if domain.labels is None:
        raise DataError(
            f"{domain.name} has no labels; needed: a class for each image, as ImageNet-C is a tree of classes. Load it "
            "with `undrift_bench.data.imagenet`."
        )
    classes = [domain.class_names[label] for label in domain.labels.tolist()]
    paths = [f"{name}/{Path(source.name).stem}.JPEG" for name, source in zip(classes, domain.sources, strict=True)]
    order = sorted(range(len(paths)), key=paths.__getitem__)
    files = [paths[index] for index in order]
    twins = next((path for path, after in pairwise(files) if path == after), None)
    if twins:
        raise DataError(
            f"{domain.name} has two images that would be written to {twins}; needed: a name for each image in its "
            "class, endings aside. Rename one."
        )
    preprocess = replace(domain.preprocess, mean=(0.0,) * 3, std=(1.0,) * 3)
    return domain.select(order).prepared(preprocess), files


Batch = tuple[int, Tensor, list[int]]


def _read(domain: FileDomain, device: torch.device | str, workers: int | None) -> Iterator[Batch]:
    """Yield (index of the first image, a batch of uint8 images, the rows that could be read)."""
    index = {source.name: place for place, source in enumerate(domain.sources)}
    for images, names in domain.named_batches(BATCH, device=device, workers=workers):
        first = index[names[0]] // BATCH * BATCH
        rows = [index[name] - first for name in names]
        # A broken image leaves its row black, so that later ones keep their numbers and noise
        batch = torch.zeros(rows[-1] + 1, *images.shape[1:], dtype=torch.uint8, device=images.device)
        batch[rows] = (images * 255).round().to(torch.uint8)
        yield first, batch, rows


def _save_jpeg(path: Path, pixels: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pillow().fromarray(pixels).save(path, "JPEG", quality=JPEG_QUALITY, optimize=True)
