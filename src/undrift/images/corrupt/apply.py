"""Corrupt a batch, in pieces that fit the cache or the device."""

from __future__ import annotations

from functools import partial
from os import PathLike
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from undrift._errors import DataError, OptionError
from undrift.images.corrupt import blur, digital, noise, weather
from undrift.images.corrupt.constants import CORRUPTIONS, DEVELOPMENT, SETS, SEVERITIES, Constants, ConstantSet
from undrift.images.corrupt.draws import Draws
from undrift.images.corrupt.pictures import frost_pictures
from undrift.images.tree import choose

SMALLEST_SIDE = 16
CIFAR_SIDE = 64
"""Up to this side the constants for 32×32 are nearer than those for 224×224."""


class Corruption(Protocol):
    """A corruption of float32 images in [0, 1]; what leaves the range is clipped by the caller."""

    def __call__(self, x: Tensor, c: Constants, draws: Draws, /) -> Tensor:
        """Return the images corrupted with the constants of one severity."""
        ...


_FUNCTIONS: dict[str, Corruption] = {
    "gaussian_noise": noise.gaussian_noise,
    "shot_noise": noise.shot_noise,
    "impulse_noise": noise.impulse_noise,
    "defocus_blur": blur.defocus_blur,
    "glass_blur": blur.glass_blur,
    "motion_blur": blur.motion_blur,
    "zoom_blur": blur.zoom_blur,
    "snow": weather.snow,
    "fog": weather.fog,
    "brightness": weather.brightness,
    "contrast": digital.contrast,
    "elastic_transform": digital.elastic_transform,
    "pixelate": digital.pixelate,
    "jpeg_compression": digital.jpeg_compression,
    "speckle_noise": noise.speckle_noise,
    "gaussian_blur": blur.gaussian_blur,
    "saturate": digital.saturate,
}


def corrupt(
    images: Tensor,
    name: str,
    severity: int,
    seed: int = 0,
    first: int = 0,
    *,
    constants: ConstantSet | None = None,
    frost: str | PathLike[str] | None = None,
) -> Tensor:
    """Return the images corrupted, with unchanged dtype, shape and device.

    Arithmetic is on [0, 1] in float32, and the result is clipped. A uint8 result is rounded down to a whole grey level,
    as in the published files. Random numbers of image i depend on (seed, name, first + i) only: a batch, its halves and
    its single images give the same bits on the same kind of device.

    Args:
        images: N×3×H×W, uint8 or floating point in [0, 1], sides of at least 16.
        name: one of `CORRUPTIONS` or `DEVELOPMENT`.
        severity: 1 to 5.
        first: the index of the first image in its data set.
        constants: "cifar" or "imagenet"; None takes "cifar" for sides up to 64, "imagenet" above.
        frost: a folder with frost1.png … frost5.jpg; None takes them from the installed `imagecorruptions` wheel.

    Example:
        >>> images = torch.full((2, 3, 32, 32), 0.5)
        >>> corrupt(images, "contrast", severity=5).shape
        torch.Size([2, 3, 32, 32])
    """
    check_images(images)
    chosen = _constants(name, severity, constants, images)
    if first < 0:
        raise OptionError(f"first={first} is no image's index; needed: 0 or more. Pass where the batch begins.")
    apply = _FUNCTIONS.get(name) or _frost(chosen, frost, images)
    out = torch.empty_like(images, memory_format=torch.contiguous_format)
    piece = _images_at_once(images)
    for start in range(0, len(images), piece):
        part = images[start : start + piece]
        draws = Draws.of(seed, name, first + start, len(part), images.device)
        out[start : start + piece] = _stored(apply(_unit_range(part), chosen, draws).clamp_(0, 1), images.dtype)
    return out


def _frost(c: Constants, folder: str | PathLike[str] | None, images: Tensor) -> Corruption:
    height, width = images.shape[-2:]
    pictures = frost_pictures(None if folder is None else Path(folder), int(c[2]), height, width)
    return partial(weather.frost, pictures=[picture.to(images.device) for picture in pictures])


def _unit_range(images: Tensor) -> Tensor:
    x = images.to(torch.float32, memory_format=torch.contiguous_format)
    return x / 255 if images.dtype == torch.uint8 else x


def _stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in [0, 1] as `dtype`; uint8 rounds down, except for whole levels that float32 holds slightly too low."""
    return (x * 255 + 1e-3).to(dtype) if dtype == torch.uint8 else x.to(dtype)


def _images_at_once(images: Tensor) -> int:
    """Return the number of images per piece: what fits a CPU's caches, or a quarter of a gigabyte on a GPU."""
    values = 2**19 if images.device.type == "cpu" else 2**26
    return max(1, values // (images.shape[1:].numel()))


def check_images(images: Tensor) -> None:
    """Raise unless the images can be corrupted."""
    need = f"needed: N×3×H×W, uint8 or floating point in [0, 1], sides of at least {SMALLEST_SIDE}"
    if images.ndim != 4 or images.shape[1] != 3 or min(images.shape[-2:]) < SMALLEST_SIDE:
        todo = "Make it a batch with images[None]." if images.ndim == 3 else "Permute, repeat or resize them first."
        raise DataError(f"the images have shape {tuple(images.shape)}; {need}. {todo}")
    if images.dtype != torch.uint8 and not images.dtype.is_floating_point:
        raise DataError(f"the images are {images.dtype}; {need}. Convert them with images.to(torch.uint8).")
    if images.dtype.is_floating_point and len(images):
        low, high = (float(end) for end in images.aminmax())
        if not (low >= 0 and high <= 1):
            todo = "Corrupt them before they are normalised, or divide them by 255."
            raise DataError(f"the images range from {low:.3g} to {high:.3g}; {need}. {todo}")


def _constants(name: str, severity: int, constants: ConstantSet | None, images: Tensor) -> Constants:
    choose(name, (*CORRUPTIONS, *DEVELOPMENT), "corruption")
    if severity not in SEVERITIES:
        raise OptionError(f"severity {severity!r} does not exist; needed: 1 (mild) to 5 (severe). Choose one of these.")
    if constants is None:
        constants = "cifar" if max(images.shape[-2:]) <= CIFAR_SIDE else "imagenet"
    choose(constants, SETS, "set of constants")
    return SETS[constants][name][severity - 1]
