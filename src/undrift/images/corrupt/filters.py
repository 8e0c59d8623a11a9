"""Filters whose result for an image does not depend on its batch, bit for bit.

The order of sums in a matrix product may depend on the batch size. So the products here are exact: pixels are multiples
of 1/256 of a grey level, weights multiples of 2^-16, and float64 holds every partial sum of pixel × weight × weight
without rounding. All other operations are elementwise.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Matrix = npt.NDArray[np.float64]

_PIXEL_STEPS = 255 * 256
_WEIGHT_STEPS = 2.0**16


def whole_levels(x: Tensor) -> Tensor:
    """Round to the nearest of the 256 grey levels, as storing an 8-bit picture does."""
    return (x * 255).add_(0.5).floor_().div_(255)


def lower_levels(x: Tensor) -> Tensor:
    """Round down to one of the 256 grey levels, except for whole levels that float32 holds slightly too low."""
    return (x * 255).add_(1e-3).floor_().div_(255)


def fixed_point(x: Tensor) -> Tensor:
    """Return x in 1/256 of a grey level, whole numbers in float64: sums of them are exact in any order."""
    return (x.double() * _PIXEL_STEPS).round_()


def exact_mean(x: Tensor) -> Tensor:
    """Return the mean over height and width, (images, channels, 1, 1)."""
    pixels = x.shape[-1] * x.shape[-2]
    return (fixed_point(x).sum(dim=(-2, -1), keepdim=True) / (_PIXEL_STEPS * pixels)).float()


def separable(x: Tensor, rows: Matrix, columns: Matrix) -> Tensor:
    """Return rows @ x @ columnsᵀ for every plane of x."""
    left = torch.from_numpy(_exact_weights(rows)).to(x.device)
    right = torch.from_numpy(_exact_weights(columns)).to(x.device)
    return (left @ (fixed_point(x) @ right.T) / _PIXEL_STEPS).float()


def _exact_weights(matrix: Matrix) -> Matrix:
    """Round weights to multiples of 2^-16; the largest of a row absorbs the rest, so that a flat picture stays flat."""
    rounded = np.round(matrix * _WEIGHT_STEPS)
    rest = np.round(matrix.sum(axis=1) * _WEIGHT_STEPS) - rounded.sum(axis=1)
    rounded[np.arange(len(matrix)), matrix.argmax(axis=1)] += rest
    return np.asarray(rounded / _WEIGHT_STEPS)


def gaussian(x: Tensor, sigma: float, truncate: float = 4.0, border: str = "edge") -> Tensor:
    """Return x smoothed by a Gaussian cut off at `truncate` σ.

    Args:
        border: "edge" repeats the last pixel, "symmetric" mirrors the picture at its edge.
    """
    height, width = x.shape[-2:]
    return separable(
        x, _gaussian_matrix(height, sigma, truncate, border), _gaussian_matrix(width, sigma, truncate, border)
    )


@lru_cache(maxsize=64)
def _gaussian_matrix(size: int, sigma: float, truncate: float, border: str) -> Matrix:
    """Return the smoothing of one axis as a matrix, its border folded in: any σ costs the same."""
    radius = int(truncate * sigma + 0.5)
    if radius == 0:
        return np.eye(size)
    weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / sigma) ** 2)
    weights /= weights.sum()
    source = np.pad(np.arange(size), radius, mode="edge" if border == "edge" else "symmetric")
    matrix = np.zeros((size, size))
    for tap, weight in enumerate(weights):
        np.add.at(matrix, (np.arange(size), source[tap : tap + size]), weight)
    return matrix


def correlate(x: Tensor, kernel: Matrix) -> Tensor:
    """Return x filtered by an odd-sized kernel; the border is mirrored about the last pixel's centre."""
    height, width = x.shape[-2:]
    up, left = (side // 2 for side in kernel.shape)
    rows = torch.from_numpy(np.pad(np.arange(height), up, mode="reflect")).to(x.device)
    columns = torch.from_numpy(np.pad(np.arange(width), left, mode="reflect")).to(x.device)
    padded = pixels_first(x).index_select(0, rows).index_select(1, columns)
    total = padded.new_zeros(height, width, *padded.shape[2:])
    for row, column in np.argwhere(kernel > 1e-8).tolist():
        total += padded[row : row + height, column : column + width] * float(kernel[row, column])
    return images_first(total)


def zoom(x: Tensor, factor: float) -> Tensor:
    """Return the centre of x enlarged to its full size, linearly; x and result are pixels first."""
    for axis in (0, 1):
        low, high, weight = (torch.from_numpy(part).to(x.device) for part in _zoom_axis(x.shape[axis], factor))
        weight = weight.view(-1, *[1] * (x.ndim - axis - 1))
        x = (x.index_select(axis, low) * (1 - weight)).add_(x.index_select(axis, high).mul_(weight))
    return x


@lru_cache(maxsize=256)
def _zoom_axis(
    size: int, factor: float
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Return the two source pixels of every target pixel, and the weight of the second.

    The central ceil(size / factor) pixels are spread over round(that × factor) places, the first and the last pixel at
    the ends, and the middle `size` places are kept.
    """
    kept = int(np.ceil(size / factor))
    spread = round(kept * factor)
    place = np.arange(size) + (spread - size) // 2
    source = place * (kept - 1) / max(spread - 1, 1)
    low = np.minimum(source.astype(np.int64), kept - 1)
    high = np.minimum(low + 1, kept - 1)
    first = (size - kept) // 2
    return low + first, high + first, (source - low).astype(np.float32)


def pixels_first(x: Tensor) -> Tensor:
    """Return (height, width, images, channels): shifts and row picks then move long contiguous runs."""
    return x.permute(2, 3, 0, 1).contiguous()


def images_first(x: Tensor) -> Tensor:
    """Undo `pixels_first`."""
    return x.permute(2, 3, 0, 1).contiguous()
