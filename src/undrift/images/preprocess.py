"""Preprocessing of images as a value that can be compared, saved and loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from undrift._errors import DataError, OptionError
from undrift.system.validate import a_type

if TYPE_CHECKING:
    from PIL.Image import Image

Interpolation = Literal["nearest", "bilinear", "bicubic"]
MOST_PIXELS = 89_478_485
"""Pixels that an image may be resized to: from here on Pillow suspects that a file was made to fill the memory."""


@cache
def _channelwise(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return one value per channel, cached: copying it to a GPU for every batch would wait."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device).view(-1, 1, 1)


@dataclass(frozen=True)
class Preprocess:
    """Resize, centre crop, scale to [0, 1], normalise, in this order; each step is optional.

    `frame` and `frame_image` do the geometry and keep uint8, so that images can be stored, sent to a device and
    corrupted at a quarter of the size; `normalise` does the rest; calling the object does both.

    Args:
        mean: subtracted from [0, 1] images, one value per channel (1 or 3 channels).
        std: divides, after the mean.
        resize: length of the shorter side, or (height, width); None keeps the size.
        crop: side of the centre crop; None does not crop.
        interpolation: "nearest", "bilinear" or "bicubic"; the last two are antialiased.

    Example:
        >>> halves = Preprocess(mean=(0.5,) * 3, std=(0.5,) * 3)
        >>> halves(torch.full((1, 3, 2, 2), 255, dtype=torch.uint8)).unique()
        tensor([1.])
    """

    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    resize: int | tuple[int, int] | None = None
    crop: int | None = None
    interpolation: Interpolation = "bilinear"

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or len(self.mean) not in (1, 3):
            raise OptionError(
                f"preprocessing has {len(self.mean)} means and {len(self.std)} deviations; needed: one of each for "
                "1 or 3 channels. Give `mean` and `std` as tuples of the same length."
            )
        if min(self.std) <= 0:
            raise OptionError(f"std {self.std} must be positive, as images are divided by it. Use 1 to leave them.")
        if self.interpolation not in get_args(Interpolation):
            raise OptionError(
                f"interpolation {self.interpolation!r} does not exist; needed: one of "
                f"{', '.join(get_args(Interpolation))}. Take the one that the network was trained with."
            )
        sizes = self.resize if isinstance(self.resize, tuple) else () if self.resize is None else (self.resize,)
        if min(*sizes, self.crop or 1, 1) < 1 or (self.crop and sizes and min(sizes) < self.crop):
            raise OptionError(
                f"resize={self.resize} and crop={self.crop} do not fit together; needed: positive sizes, the crop "
                "inside the resized image. Use the sizes that the network was trained with."
            )

    @property
    def channels(self) -> int:
        """Channels of the images that the network takes: 1 (grey) or 3 (RGB)."""
        return len(self.mean)

    def __call__(self, images: Tensor) -> Tensor:
        """Return the batch N×C×H×W (uint8, or float in [0, 1]) as the network wants it, in float."""
        return self.normalise(self.frame(images))

    def frame(self, images: Tensor) -> Tensor:
        """Return the batch N×C×H×W resized and cropped, in its own dtype."""
        height, width = images.shape[-2:]
        size = self._resized(height, width)
        if size != (height, width):
            mode = "nearest-exact" if self.interpolation == "nearest" else self.interpolation
            resized = F.interpolate(images.float(), size, mode=mode, antialias=mode != "nearest-exact")
            images = resized if images.is_floating_point() else resized.round().clamp(0, 255).to(images.dtype)
        top, left, height, width = self._window(*size)
        return images[..., top : top + height, left : left + width]

    def frame_image(self, image: Image) -> Tensor:
        """Return a Pillow image resized and cropped, as a uint8 tensor C×H×W."""
        from PIL.Image import Resampling

        image = image.convert("L" if self.channels == 1 else "RGB")
        height, width = self._resized(image.height, image.width)
        if (width, height) != image.size:
            image = image.resize((width, height), Resampling[self.interpolation.upper()])
        top, left, height, width = self._window(height, width)
        pixels = np.array(image.crop((left, top, left + width, top + height)))
        return torch.from_numpy(pixels.reshape(height, width, self.channels)).permute(2, 0, 1)

    def normalise(self, images: Tensor) -> Tensor:
        """Return the batch N×C×H×W in float: uint8 scaled to [0, 1], mean subtracted, divided by std."""
        if images.dim() != 4 or images.shape[1] != self.channels:
            raise DataError(
                f"a batch of shape {tuple(images.shape)} was given; needed: N×{self.channels}×H×W. "
                "Use the preprocessing of the network at hand, or convert the images."
            )
        if images.dtype == torch.uint8:
            images = images.float() / 255
        elif not images.is_floating_point():
            raise DataError(
                f"images of dtype {images.dtype} were given; needed: uint8 in [0, 255] or float in [0, 1]. "
                "Convert the images first."
            )
        if any(self.mean):
            images = images - _channelwise(self.mean, images.dtype, images.device)
        if any(value != 1 for value in self.std):
            images = images / _channelwise(self.std, images.dtype, images.device)
        return images

    def image(self, image: Image) -> Tensor:
        """Return a Pillow image as the network wants it: float C×H×W."""
        return self.normalise(self.frame_image(image)[None])[0]

    def without_resize(self) -> Preprocess:
        """Return the same for images that are resized already (such as ImageNet-C's files): crop and normalise only."""
        return replace(self, resize=None)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values that JSON can hold."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Preprocess:
        """Return what `to_dict` wrote; raise on unknown names."""
        known = {field.name for field in fields(cls)}
        if not values.keys() <= known:
            raise DataError(
                f"preprocessing names {', '.join(sorted(values.keys() - known))}; known: {', '.join(sorted(known))}. "
                "The file was written by a newer undrift or by hand: update undrift, or correct the name."
            )
        plain: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
        }
        return cls(**plain)

    def differences(self, other: Preprocess) -> list[str]:
        """Return one line for each field in which `other` differs."""
        pairs = ((field.name, getattr(self, field.name), getattr(other, field.name)) for field in fields(self))
        return [f"{name}: {mine} against {theirs}" for name, mine, theirs in pairs if mine != theirs]

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        if min(height, width) < 1:
            raise DataError(
                f"an image of {height}×{width} pixels was given; needed: at least 1×1. Leave the image out."
            )
        if self.resize is None or isinstance(self.resize, tuple):
            return self.resize or (height, width)
        short, long = sorted((height, width))
        rest = int(self.resize * long / short)
        if self.resize * rest > MOST_PIXELS:
            raise DataError(
                f"an image of {height}×{width} pixels was given, which a shorter side of {self.resize} makes "
                f"{self.resize * rest:,} pixels; needed: at most {MOST_PIXELS:,}. Cut it, or leave it out."
            )
        return (self.resize, rest) if height <= width else (rest, self.resize)

    def _window(self, height: int, width: int) -> tuple[int, int, int, int]:
        if self.crop is None:
            return 0, 0, height, width
        if min(height, width) < self.crop:
            raise DataError(
                f"an image of {height}×{width} pixels was given; needed: at least {self.crop}×{self.crop}, "
                "the crop. Set `resize`, or leave the image out."
            )
        return round((height - self.crop) / 2), round((width - self.crop) / 2), self.crop, self.crop


RAW = Preprocess()
"""RGB images in [0, 1], size and values left alone."""

GREY = Preprocess(mean=(0.0,), std=(1.0,))
"""Grey images in [0, 1], size and values left alone."""

IMAGENET = Preprocess(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), resize=256, crop=224)
"""ImageNet's evaluation: shorter side 256, centre crop 224."""

SHOT = replace(IMAGENET, resize=(256, 256))
"""SHOT's evaluation on Office and PACS: squeezed to 256×256, centre crop 224."""


def checked(preprocess: object) -> Preprocess:
    """Return what was given as preprocessing, if it is that."""
    if not isinstance(preprocess, Preprocess):
        raise OptionError(
            f"preprocess={preprocess!r} is {a_type(preprocess)}; needed: a value such as "
            "undrift.images.IMAGENET, or undrift.images.Preprocess(mean=…, std=…, resize=…, crop=…). "
            "Give that, or apply a transform of your own in a Dataset, and give the Dataset."
        )
    return preprocess
