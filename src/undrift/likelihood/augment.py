"""Augment a batch on its device, as CoTTA and ROID do.

Parameters are drawn once per batch, on the CPU; only pixel noise differs between images.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from undrift._errors import DataError
from undrift.kernels import normal
from undrift.likelihood.views import JITTERS, Outside, View, seen
from undrift.system.randomness import draw_keys, own_generator

if TYPE_CHECKING:
    from undrift.images.preprocess import Preprocess

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
