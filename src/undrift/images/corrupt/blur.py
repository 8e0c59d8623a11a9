"""Blur corruptions: defocus, glass, motion, zoom; gaussian for development."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from undrift.images.corrupt.constants import Constants
from undrift.images.corrupt.draws import Draws
from undrift.images.corrupt.filters import (
    Matrix,
    correlate,
    gaussian,
    images_first,
    lower_levels,
    pixels_first,
    whole_levels,
    zoom,
)
from undrift.images.corrupt.streak import streak


def defocus_blur(x: Tensor, c: Constants, _: Draws) -> Tensor:
    """Return x seen through a disk of radius c₀ whose rim is smoothed with σ = c₁."""
    return correlate(x, _disk(*c))


@lru_cache(maxsize=16)
def _disk(radius: float, sigma: float) -> Matrix:
    """Return the kernel: a disk on 17×17 places smoothed by 3×3 taps (larger: 5×5 taps)."""
    reach = 8 if radius <= 8 else int(radius)
    taps = 1 if radius <= 8 else 2
    y, x = np.mgrid[-reach : reach + 1, -reach : reach + 1]
    disk = (x**2 + y**2 <= radius**2).astype(np.float64)
    disk /= disk.sum()
    weights = np.exp(-0.5 * (np.arange(-taps, taps + 1) / sigma) ** 2)
    weights /= weights.sum()
    padded = np.pad(disk, taps, mode="reflect")
    size = 2 * reach + 1
    rows = sum(w * padded[i : i + size] for i, w in enumerate(weights))
    return np.asarray(sum(w * rows[:, i : i + size] for i, w in enumerate(weights)))


def glass_blur(x: Tensor, c: Constants, draws: Draws) -> Tensor:
    """Return x smoothed (σ = c₀), its pixels overwritten by neighbours within c₁ in c₂ rounds, and smoothed again."""
    sigma, reach, rounds = c[0], int(c[1]), int(c[2])
    height, width = x.shape[-2:]
    x = lower_levels(gaussian(x, sigma)).flatten(2)
    offsets = draws.uniform(rounds, 2, height, width).mul_(2 * reach).floor_().long().sub_(reach)
    for turn in range(rounds):
        source = _pixel_sources(offsets[:, turn, 0], offsets[:, turn, 1], reach)
        x = x.gather(2, source[:, None].expand_as(x))
    return gaussian(x.view(*x.shape[:2], height, width), sigma)


def _pixel_sources(dy: Tensor, dx: Tensor, reach: int) -> Tensor:
    """Return where each pixel's content comes from after one round, (images, pixels).

    Pixels are visited from the bottom right, and each is overwritten by the pixel at its offset: by its old content if
    that pixel is visited later, by what was copied there if it was visited before. The second kind are pointers.
    Following all of them at once, twice as far each time, takes a few steps instead of one per pixel.
    """
    _, height, width = dy.shape
    pixels = height * width
    inside = torch.zeros(height, width, dtype=torch.bool, device=dy.device)
    inside[reach + 1 : height - reach + 1, reach + 1 : width - reach + 1] = True
    inside = inside.flatten()
    here = torch.arange(pixels, device=dy.device)
    target = torch.where(inside, here + (dy * width + dx).flatten(1), here)
    visited_before = inside & (target > here) & inside[target]
    # q < pixels: what q holds after the round; q + pixels: what q held before it
    pointer = torch.where(visited_before, target, target + pixels)
    while bool((pointer < pixels).any()):
        pointer = torch.where(pointer < pixels, pointer.gather(1, pointer.clamp(max=pixels - 1)), pointer)
    return pointer - pixels


def motion_blur(x: Tensor, c: Constants, draws: Draws) -> Tensor:
    """Return x smeared along a line at an angle U(−45°, 45°), with one-sided Gaussian weights (radius c₀, σ = c₁)."""
    angle = draws.numbers(1)[:, 0] * 90 - 45
    return whole_levels(streak(x, int(c[0]), c[1], angle))


def zoom_blur(x: Tensor, c: Constants, _: Draws) -> Tensor:
    """Return the mean of x and its centre zooms by 1, 1 + c₁, 1 + 2c₁, … up to c₀."""
    # np.arange in floating point, as the published files were made: ends of 1.06 and 1.11 are included, others are not
    factors = np.arange(1, *c)
    pixels = pixels_first(x)
    total = pixels.clone()
    for factor in factors.tolist():
        total += zoom(pixels, factor)
    return images_first(total.div_(len(factors) + 1))


def gaussian_blur(x: Tensor, c: Constants, _: Draws) -> Tensor:
    """Return x smoothed by a Gaussian of σ = c pixels."""
    return gaussian(x, c[0])
