"""Apply one augmented view to a batch in [0, 1]: colour, affine, blur, flip, with one set of parameters.

Parameters are Python numbers, so nothing waits for a device.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Outside = Literal["border", "reflection"]

GREY = (0.299, 0.587, 0.114)  # of red, green and blue (BT.601)
JITTERS = ("brightness", "contrast", "saturation", "hue", "gamma")
TAPS = 5  # of the blur


@dataclass(frozen=True)
class View:
    """The parameters of one view; the defaults change nothing.

    Attributes:
        order: of the colour operations.
        angle: in degrees; `scale` enlarges; `shift` is to the right and down, in pixels.
        blur: σ in pixels; 0 is none.
    """

    brightness: float = 1.0
    contrast: float = 1.0
    saturation: float = 1.0
    hue: float = 0.0
    gamma: float = 1.0
    order: tuple[int, ...] = (0, 1, 2, 3, 4)
    angle: float = 0.0
    scale: float = 1.0
    shift: tuple[int, int] = (0, 0)
    blur: float = 0.0
    flip: bool = False


def seen(images: Tensor, view: View, outside: Outside) -> Tensor:
    """Return one view of images in [0, 1]."""
    images = images.clamp(0, 1)
    for number in view.order:
        name = JITTERS[number]
        images = _COLOUR[name](images, getattr(view, name))
    margin = TAPS // 2 if view.blur else 0
    images = _warp(images, view, outside, margin)
    images = _blur(images, view.blur) if view.blur else images
    return images.flip(-1) if view.flip else images


def _grey(images: Tensor) -> Tensor:
    if images.shape[1] != 3:
        return images.mean(dim=1, keepdim=True)
    red, green, blue = images.split(1, dim=1)
    return GREY[0] * red + GREY[1] * green + GREY[2] * blue


def _brightness(images: Tensor, factor: float) -> Tensor:
    return (images * factor).clamp(0, 1)


def _contrast(images: Tensor, factor: float) -> Tensor:
    mean = _grey(images).mean(dim=(2, 3), keepdim=True)
    return (images * factor + mean * (1 - factor)).clamp(0, 1)


def _saturation(images: Tensor, factor: float) -> Tensor:
    return (images * factor + _grey(images) * (1 - factor)).clamp(0, 1) if images.shape[1] == 3 else images


def _gamma(images: Tensor, exponent: float) -> Tensor:
    return images.pow(exponent)


def _hue(images: Tensor, turn: float) -> Tensor:
    """Return the images with every hue moved by a part of a turn: HSV with chroma = value · saturation."""
    if images.shape[1] != 3 or turn == 0:
        return images
    red, green, blue = images.split(1, dim=1)
    value = images.amax(dim=1, keepdim=True)
    chroma = value - images.amin(dim=1, keepdim=True)
    over = chroma.clamp_min(torch.finfo(images.dtype).tiny)  # grey has no hue; any will do
    sextant = torch.where(
        value == red,
        (green - blue) / over,
        torch.where(value == green, (blue - red) / over + 2, (red - green) / over + 4),
    )
    place = torch.cat([(channel + 6 * turn + sextant).remainder(6) for channel in (5, 3, 1)], dim=1)
    return value - chroma * torch.minimum(place, 4 - place).clamp(0, 1)


def _warp(images: Tensor, view: View, outside: Outside, margin: int) -> Tensor:
    """Rotate, scale and shift the images about their centre; the result has a margin on each side.

    Sampling border pixels or reflections equals padding first and cropping after.
    """
    height, width = images.shape[-2:]
    if (view.angle, view.scale, view.shift, margin) == (0.0, 1.0, (0, 0), 0):
        return images
    middle_x, middle_y = (width - 1) / 2, (height - 1) / 2
    x = torch.arange(-margin, width + margin, device=images.device, dtype=images.dtype) - middle_x - view.shift[0]
    y = torch.arange(-margin, height + margin, device=images.device, dtype=images.dtype) - middle_y - view.shift[1]
    cos, sin = math.cos(math.radians(view.angle)) / view.scale, math.sin(math.radians(view.angle)) / view.scale
    from_x = cos * x[None, :] + sin * y[:, None] + middle_x
    from_y = cos * y[:, None] - sin * x[None, :] + middle_y
    grid = torch.stack([2 * from_x / max(width - 1, 1) - 1, 2 * from_y / max(height - 1, 1) - 1], dim=-1)
    return F.grid_sample(images, grid.expand(len(images), -1, -1, -1), "bilinear", outside, align_corners=True)


def _blur(images: Tensor, sigma: float) -> Tensor:
    """Return the images under a Gaussian of five taps each way, the outermost two pixels of each side used up."""
    weights = [math.exp(-0.5 * ((tap - TAPS // 2) / sigma) ** 2) for tap in range(TAPS)]
    for dim in (2, 3):
        size = images.shape[dim] - TAPS + 1
        parts = [w / sum(weights) * images.narrow(dim, tap, size) for tap, w in enumerate(weights)]
        images = torch.stack(parts).sum(dim=0)
    return images


_COLOUR = {
    "brightness": _brightness,
    "contrast": _contrast,
    "saturation": _saturation,
    "hue": _hue,
    "gamma": _gamma,
}
