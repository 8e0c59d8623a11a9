"""Weather corruptions: snow, frost, fog, brightness."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from undrift.images.corrupt.constants import Constants
from undrift.images.corrupt.draws import Draws
from undrift.images.corrupt.filters import images_first, lower_levels, pixels_first, whole_levels, zoom
from undrift.images.corrupt.streak import streak


def snow(x: Tensor, c: Constants, draws: Draws) -> Tensor:
    """Return x whitened, under two layers of streaked flakes.

    Flakes are N(c₀, c₁²), zoomed by c₂, cut below c₃ and streaked (radius c₄, σ = c₅) at an angle U(−135°, −45°); the
    second layer is the first turned by 180°. The image becomes c₆·x + (1 − c₆)·max(x, 1.5·grey + 0.5).
    """
    mean, deviation, factor, threshold, radius, sigma, keep = c
    flakes = draws.normal(1, *x.shape[-2:]).mul_(deviation).add_(mean)
    flakes = images_first(zoom(pixels_first(flakes), factor))
    flakes = torch.where(flakes < threshold, torch.zeros_like(flakes), flakes).clamp_(0, 1)
    flakes = whole_levels(streak(lower_levels(flakes), int(radius), sigma, draws.numbers(1)[:, 0] * 90 - 135))
    white = torch.maximum(x, _grey(x) * 1.5 + 0.5)
    return x * keep + white * (1 - keep) + flakes + flakes.flip(-2, -1)


def _grey(x: Tensor) -> Tensor:
    """Return the luma 0.299 R + 0.587 G + 0.114 B, (images, 1, height, width)."""
    return x[:, :1] * 0.299 + x[:, 1:2] * 0.587 + x[:, 2:] * 0.114


def frost(x: Tensor, c: Constants, draws: Draws, pictures: Sequence[Tensor]) -> Tensor:
    """Return c₀·x + c₁·ice, ice a random crop of one of the pictures (thinned to one pixel in c₂ a side).

    Args:
        pictures: (3, height, width) each, in [0, 1], thinned already and larger than x.
    """
    height, width = x.shape[-2:]
    crops = []
    for which, down, along in draws.numbers(3).tolist():
        picture = pictures[int(which * len(pictures))]
        top = int(down * (picture.shape[1] - height))
        left = int(along * (picture.shape[2] - width))
        crops.append(picture[:, top : top + height, left : left + width])
    return x * c[0] + torch.stack(crops) * c[1]


def fog(x: Tensor, c: Constants, draws: Draws) -> Tensor:
    """Return (x + c₀·plasma) · m / (m + c₀), m the largest value of the image."""
    height, width = x.shape[-2:]
    size = 32
    while size < max(height, width):
        size *= 2
    cloud = plasma(draws.uniform(size, size), c[1])[:, None, :height, :width]
    brightest = x.amax(dim=(1, 2, 3), keepdim=True)
    return (x + cloud * c[0]) * (brightest / (brightest + c[0]))


def plasma(chance: Tensor, decay: float) -> Tensor:
    """Return clouds in [0, 1] by the diamond–square recursion on a torus.

    A point is the mean of its four neighbours on the coarser grid plus a uniform jolt in ±w², and w shrinks by `decay`
    each time the grid is halved.

    Args:
        chance: (images, size, size) uniform numbers in [0, 1), the jolt of each point; size a power of two.
    """
    jolt = chance * 2 - 1
    cloud = torch.zeros_like(chance)
    step, size = chance.shape[-1], 1.0
    while step >= 2:
        half = step // 2
        corners = cloud[:, ::step, ::step]
        pairs = corners + corners.roll(-1, 1)
        centres = (pairs + pairs.roll(-1, 2)) / 4 + jolt[:, half::step, half::step] * size
        cloud[:, half::step, half::step] = centres
        across = (corners + corners.roll(-1, 2) + centres + centres.roll(1, 1)) / 4
        cloud[:, ::step, half::step] = across + jolt[:, ::step, half::step] * size
        upright = (corners + corners.roll(-1, 1) + centres + centres.roll(1, 2)) / 4
        cloud[:, half::step, ::step] = upright + jolt[:, half::step, ::step] * size
        step, size = half, size / decay**2
    cloud = cloud - cloud.amin(dim=(1, 2), keepdim=True)
    return cloud / cloud.amax(dim=(1, 2), keepdim=True)


def brightness(x: Tensor, c: Constants, _: Draws) -> Tensor:
    """Return x with c added to its HSV value; hue and saturation stay, so the channels keep their proportions."""
    value = x.amax(dim=1, keepdim=True)
    lifted = (value + c[0]).clamp(max=1)
    return torch.where(value > 0, x * (lifted / value.clamp(min=1e-12)), lifted)
