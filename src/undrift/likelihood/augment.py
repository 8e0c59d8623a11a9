"""Augment a batch on its device, as CoTTA and ROID do.

Parameters of a view (colour, affine, blur, flip) are drawn once per batch, on the CPU, as Python numbers, so that
nothing waits for a device; only pixel noise differs between images.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from undrift._errors import DataError
from undrift.kernels import normal
from undrift.system.randomness import draw_keys, own_generator

if TYPE_CHECKING:
    from undrift.images.preprocess import Preprocess


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

SLACK = 0.02  # rounding and resizing leave [0, 1] slightly


class Augment:
    """Colour jitter, affine, Gaussian blur, flip, pixel noise, clip: CoTTA's; ROID leaves out blur and noise.

    Colour: brightness × [0.6, 1.4], contrast [0.7, 1.3], saturation [0.5, 1.5], hue ± 0.06 of a turn, gamma [0.7, 1.3],
    in random order. Affine, inside a frame of twice the side: ± 15°, whole pixels up to 1/16 of that frame, scale from
    0.9 to 1.1. Blur: σ up to 0.5. Flip: half of the time. Saturation and hue need three channels and are otherwise left
    out.

    Images must lie in [0, 1]. Normalised images are brought there and back by the mean and std of `preprocess`. A first
    batch outside raises.

    Args:
        blur: whether to blur.
        noise: standard deviation of the pixel noise.
        outside: what lies outside the image: its "border" pixels (CoTTA), or its "reflection" (ROID).
        preprocess: what was done to the images; by default the network's, if known.
        seed: of the views; without it torch's global generator gives one.
    """

    def __init__(
        self,
        *,
        blur: bool = True,
        noise: float = 0.005,
        outside: Outside = "border",
        preprocess: "Preprocess | None" = None,
        seed: int | None = None,
    ) -> None:
        self.blur, self.noise, self.outside, self.preprocess = blur, noise, outside, preprocess
        self._generator = own_generator(seed)
        self._looked = False

    @torch.no_grad()
    def __call__(self, images: Tensor, preprocess: "Preprocess | None" = None) -> Tensor:
        """Return a new view of the batch, in its own range and dtype."""
        if images.ndim != 4:
            raise DataError(
                f"a batch of shape {tuple(images.shape)} was given; views are made of images N×C×H×W. Use a method "
                "without augmentation, such as tent or eta, or roid with augmented=False."
            )
        how = self.preprocess or preprocess
        mean, std = (0.0, 1.0) if how is None else (images.new_tensor(v).view(-1, 1, 1) for v in (how.mean, how.std))
        # bfloat16 has 8 bits of mantissa, too few for colours.
        with torch.autocast(images.device.type, enabled=False):
            plain = (images * std + mean).float()
            self._look(plain)
            view = self.draw(*images.shape[-2:])
            out = seen(plain, view, self.outside)
            if self.noise:
                (key,) = draw_keys(self._generator, 1, images.device)
                out = out + self.noise * normal(key, out.shape)
            return ((out.clamp(0, 1) - mean) / std).to(images.dtype)

    def draw(self, height: int, width: int) -> View:
        """Return the parameters of the next view of images of this size."""
        between = iter(torch.rand(11, generator=self._generator).tolist())

        def uniform(low: float, high: float) -> float:
            return low + (high - low) * next(between)

        colours = {
            "brightness": uniform(0.6, 1.4),
            "contrast": uniform(0.7, 1.3),
            "saturation": uniform(0.5, 1.5),
            "hue": uniform(-0.06, 0.06),
            "gamma": uniform(0.7, 1.3),
        }
        order = tuple(torch.randperm(len(JITTERS), generator=self._generator).tolist())
        # 1/16 of the padded frame, which is twice the image.
        shift = (round(uniform(-1, 1) * width / 8), round(uniform(-1, 1) * height / 8))
        angle, scale, blur = uniform(-15, 15), uniform(0.9, 1.1), uniform(0.001, 0.5)
        flip = next(between) < 0.5
        return View(
            **colours,
            order=order,
            angle=angle,
            scale=scale,
            shift=shift,
            blur=blur if self.blur else 0.0,
            flip=flip,
        )

    def _look(self, plain: Tensor) -> None:
        """Raise at the first batch if images lie outside [0, 1], where clipping would silently spoil them."""
        if self._looked or plain.numel() == 0:
            return
        low, high = (float(v) for v in plain.aminmax())
        if low < -SLACK or high > 1 + SLACK:
            raise DataError(
                f"images have values from {low:.2f} to {high:.2f}; their views are made in [0, 1]. If they were "
                "normalised, say how: preprocess=undrift.images.Preprocess(mean=…, std=…)."
            )
        self._looked = True

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the random views."""
        return {"views": self._generator.get_state(), "looked": self._looked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self._generator.set_state(state["views"].cpu())
        self._looked = state["looked"]
