"""Smear images along a line, each at its own angle, for motion blur and snow."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor


def streak(x: Tensor, radius: int, sigma: float, degrees: npt.NDArray[np.float64]) -> Tensor:
    """Return the weighted mean of x shifted i = 0 … 2·radius pixels along a line, the edge pixels repeated.

    Weights are exp(−i² / 2σ²), normalised; shifts are rounded to whole pixels, as ImageMagick does.

    Args:
        degrees: one angle per image.
    """
    weights = np.exp(-0.5 * (np.arange(2 * radius + 1) / sigma) ** 2)
    weights /= weights.sum()
    weights = weights[weights > 1e-8]  # beyond, a shift changes no bit of a float32 sum
    shift = np.arange(len(weights))
    # math, not numpy: a vectorised cosine may round differently with the length of the array
    cosine = np.array([math.cos(math.radians(angle)) for angle in degrees.tolist()])
    sine = np.array([math.sin(math.radians(angle)) for angle in degrees.tolist()])
    dx = np.ceil(shift * cosine[:, None] - 0.5).astype(np.int64)
    dy = np.ceil(shift * sine[:, None] - 0.5).astype(np.int64)

    images, channels, height, width = x.shape
    left, right, up, down = -min(dx.min(), 0), max(dx.max(), 0), -min(dy.min(), 0), max(dy.max(), 0)
    padded = F.pad(x, (int(left), int(right), int(up), int(down)), mode="replicate")
    row = padded.shape[-1]
    # A shifted picture is one long run of the padded one: starts differ by image, the copying stays contiguous
    run = (height - 1) * row + width
    runs = padded.flatten(2).unfold(2, run, 1)
    start = torch.from_numpy((dy + up) * row + dx + left).to(x.device)
    image = torch.arange(images, device=x.device)
    total = x.new_zeros(images, channels, run)
    for tap, weight in enumerate(weights.tolist()):
        total += runs[image, :, start[:, tap]].mul_(weight)
    return total.as_strided((images, channels, height, width), (channels * run, run, row, 1)).contiguous()
