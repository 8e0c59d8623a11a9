"""Digital corruptions: contrast, elastic, pixelate, JPEG; saturate for development."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from undrift.images.corrupt.constants import Constants
from undrift.images.corrupt.draws import Draws
from undrift.images.corrupt.filters import Matrix, exact_mean, gaussian, separable, whole_levels
from undrift.images.sources import pillow

Pixels = npt.NDArray[np.uint8]


def contrast(x: Tensor, c: Constants, _: Draws) -> Tensor:
    """Return (x − mean)·c + mean, the mean taken per image and channel."""
    mean = exact_mean(x)
    return (x - mean) * c[0] + mean


def elastic_transform(x: Tensor, c: Constants, draws: Draws) -> Tensor:
    """Return x after a random affine map and a random smooth displacement.

    The affine map moves three points by U(−c₂, c₂) per axis; the displacement is c₀ times uniform noise in ±1, smoothed
    with σ = c₁.
    """
    alpha, sigma, jitter = c
    height, width = x.shape[-2:]
    down = torch.arange(height, dtype=torch.float32, device=x.device).view(-1, 1)
    along = torch.arange(width, dtype=torch.float32, device=x.device)
    (xx, xy, x0), (yx, yy, y0) = _affine(draws, height, width, jitter)
    x = _sample(x, along * xx + down * xy + x0, along * yx + down * yy + y0, mirror_pixel_centres=True)
    if alpha == 0:
        return x
    noise = draws.uniform(2, height, width).mul_(2).sub_(1)
    shift = gaussian(noise, sigma, truncate=3.0, border="symmetric") * alpha
    return _sample(x, along + shift[:, 0], down + shift[:, 1], mirror_pixel_centres=False)


def _affine(draws: Draws, height: int, width: int, jitter: float) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return the map from target to source: (xx, xy, x0) of x = xx·x′ + xy·y′ + x0, and (yx, yy, y0) of y.

    Three corners of a square, a third of the picture around its centre, are moved; the map takes the moved points back.
    """
    third = min(height, width) // 3
    points = np.array([width // 2, height // 2]) + third * np.array([[1, 1], [1, -1], [-1, -1]])
    moved = points + (draws.numbers(6).reshape(-1, 3, 2) * 2 - 1) * jitter
    u, v = moved[:, 0] - moved[:, 2], moved[:, 1] - moved[:, 2]
    determinant = u[:, 0] * v[:, 1] - u[:, 1] * v[:, 0]
    maps = []
    for axis in (0, 1):
        p, q = points[0, axis] - points[2, axis], points[1, axis] - points[2, axis]
        by_x = (p * v[:, 1] - q * u[:, 1]) / determinant
        by_y = (q * u[:, 0] - p * v[:, 0]) / determinant
        rest = points[2, axis] - by_x * moved[:, 2, 0] - by_y * moved[:, 2, 1]
        entries = (torch.from_numpy(entry).float().to(draws.device) for entry in (by_x, by_y, rest))
        maps.append(tuple(entry.view(-1, 1, 1) for entry in entries))
    return maps[0], maps[1]


def _sample(x: Tensor, along: Tensor, down: Tensor, *, mirror_pixel_centres: bool) -> Tensor:
    """Return x read linearly at pixel coordinates, mirrored at the border's pixel centres or at its outer edge."""
    height, width = x.shape[-2:]
    if mirror_pixel_centres:
        grid = torch.stack((along * (2 / (width - 1)) - 1, down * (2 / (height - 1)) - 1), dim=-1)
    else:
        grid = torch.stack(((along * 2 + 1) / width - 1, (down * 2 + 1) / height - 1), dim=-1)
    return F.grid_sample(x, grid, padding_mode="reflection", align_corners=mirror_pixel_centres)


def pixelate(x: Tensor, c: Constants, _: Draws) -> Tensor:
    """Return x shrunk by c with a box filter and enlarged back, on 8-bit pictures as Pillow does it."""
    height, width = x.shape[-2:]
    low, narrow = int(height * c[0]), int(width * c[0])
    # Pillow stores whole levels between the two axes
    x = whole_levels(separable(whole_levels(x), np.eye(height), _box(width, narrow)))
    x = whole_levels(separable(x, _box(height, low), np.eye(narrow)))
    return whole_levels(separable(x, _box(low, height), _box(narrow, width)))


@lru_cache(maxsize=64)
def _box(size: int, target: int) -> Matrix:
    """Return the box resize of one axis: the mean of the pixels whose centres fall into each target pixel.

    Enlarging, the box is as wide as a source pixel and holds one centre: the nearest.
    """
    scale = size / target
    centre = (np.arange(target) + 0.5) * scale
    distance = (np.arange(size)[None] + 0.5 - centre[:, None]) / max(scale, 1)
    matrix = ((distance > -0.5) & (distance <= 0.5)).astype(np.float64)
    return np.asarray(matrix / matrix.sum(axis=1, keepdims=True))


def jpeg_compression(x: Tensor, c: Constants, _: Draws) -> Tensor:
    """Return x after JPEG at quality c, written and read by Pillow (chroma at half the resolution)."""
    image = pillow()

    def through_file(pixels: Pixels) -> Pixels:
        file = io.BytesIO()
        image.fromarray(pixels).save(file, "JPEG", quality=int(c[0]))
        with image.open(file) as picture:
            return np.asarray(picture)

    pixels = (x * 255).add_(0.5).byte().permute(0, 2, 3, 1).cpu().numpy()
    # Pillow's codec runs without Python's lock
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        coded = np.stack(list(pool.map(through_file, pixels)))
    return torch.from_numpy(coded).to(x.device).permute(0, 3, 1, 2).float().div_(255)


def saturate(x: Tensor, c: Constants, _: Draws) -> Tensor:
    """Return x with HSV saturation c₀·S + c₁; grey pixels have hue 0, so an offset tints them red."""
    value, low = x.amax(dim=1, keepdim=True), x.amin(dim=1, keepdim=True)
    saturation = (value - low) / value.clamp(min=1e-12)
    target = (saturation * c[0] + c[1]).clamp(0, 1)
    coloured = value - (value - x) * (target / saturation.clamp(min=1e-12))
    washed = value * (1 - target)
    return torch.where(saturation > 0, coloured, torch.cat((value, washed, washed), dim=1))
