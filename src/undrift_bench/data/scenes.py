"""Scenes to segment: scanned digits laid on photographs, 3×64×64, with a class per pixel.

Nothing is downloaded: the digits are scikit-learn's scans (Alpaydin & Kaynak 1998), the photographs its two sample
images. Classes are the background (0) and the digits 0 to 9 (1 to 10). Training scenes take other scans and other parts
of the photographs than test scenes do.
"""

from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from undrift_bench.data.digits_domains import _package

SIDE = 64
CLASSES = 11
TRAIN_SCANS = 1200  # of 1,797; the rest is for test scenes
MOST_DIGITS = 4
INK = 0.4  # from this share of ink on, a pixel belongs to the digit


def scenes(part: Literal["train", "test"], count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return so many scenes, uint8 N×3×64×64, and their classes, N×64×64."""
    random = torch.Generator().manual_seed(2 * seed + (part == "test"))
    photos, (scans, digits) = _photographs(part), _scans(part)
    images = torch.stack([_crop(photos[i % len(photos)], random) for i in range(count)])
    labels = torch.zeros(count, SIDE, SIDE, dtype=torch.long)
    for place in range(count):
        for _ in range(int(torch.randint(2, MOST_DIGITS + 1, (), generator=random))):
            _lay(images[place], labels[place], scans, digits, random)
    return (images * 255).round().to(torch.uint8), labels


def _lay(image: Tensor, label: Tensor, scans: Tensor, digits: Tensor, random: torch.Generator) -> None:
    """Lay one digit of a random size and colour on a scene, in place."""
    which = int(torch.randint(len(scans), (), generator=random))
    side = int(torch.randint(20, 33, (), generator=random))
    ink = F.interpolate(scans[which][None, None], (side, side), mode="bicubic", align_corners=False)[0, 0].clamp(0, 1)
    top, left = (int(v) for v in torch.randint(SIDE - side + 1, (2,), generator=random))
    rows, columns = slice(top, top + side), slice(left, left + side)
    colour = torch.rand(3, 1, 1, generator=random)
    image[:, rows, columns] = image[:, rows, columns] * (1 - ink) + colour * ink
    label[rows, columns] = torch.where(ink > INK, int(digits[which]) + 1, label[rows, columns])


def _crop(photo: Tensor, random: torch.Generator) -> Tensor:
    top, left = (int(torch.randint(size - SIDE + 1, (), generator=random)) for size in photo.shape[1:])
    return photo[:, top : top + SIDE, left : left + SIDE].clone()


def _photographs(part: str) -> list[Tensor]:
    """Return the left parts of the photographs for training, the right ones for tests, at half their size."""
    pictures = _package("sklearn.datasets", "scikit-learn").load_sample_images().images
    whole = [torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255 for picture in pictures]
    half = [F.avg_pool2d(photo, 2) for photo in whole]
    middle = [photo.shape[2] * 6 // 10 for photo in half]
    return [p[..., :m] if part == "train" else p[..., m:] for p, m in zip(half, middle, strict=True)]


def _scans(part: str) -> tuple[Tensor, Tensor]:
    found = _package("sklearn.datasets", "scikit-learn").load_digits()
    scans = torch.from_numpy(np.asarray(found.images, dtype=np.float32) / 16)
    digits = torch.from_numpy(np.asarray(found.target, dtype=np.int64))
    chosen = slice(0, TRAIN_SCANS) if part == "train" else slice(TRAIN_SCANS, None)
    return scans[chosen], digits[chosen]
