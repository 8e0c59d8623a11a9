"""Sketch each image of a domain in a few numbers, to choose between packs.

For each norm layer, an image has means m and variances v of some channels, over positions. Two signed sums over
channels of m / √(v + m²) and two of ln v are its sketch. A pack holds their mean and covariance over its images, and
the pack with the greatest linear discriminant is the nearest. The discriminant discounts variation within domains.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from undrift.kernels.reference import without_autocast
from undrift.packs.moments import ImageMoments

VERSION = 1
"""Of these numbers; packs with others are compared by evidence alone."""

ROWS = (1, 2)
"""Rows of a Walsh matrix, the signs of the sums: the same in every process and release."""

LEAST = 16
"""Images that a covariance is taken from."""

SHRINK = 0.5
"""Part of the covariance that is its diagonal: some hundred images, and as many numbers each."""

FLOOR = 1e-9
"""The least variance of an image's channel."""


def numbers(seen: ImageMoments) -> Tensor:
    """Return the sketch of each image, images × 4·layers."""
    var = seen.var.nan_to_num(0.0).clamp_min(FLOOR)  # one position has no variance
    parts = [seen.mean / (var + seen.mean.square()).sqrt(), var.log()]
    signs = _signs(tuple(seen.layers.values()), var.device)
    with without_autocast(var.device):  # sums in bfloat16 have too few digits to tell domains apart
        # What is not finite counts as 0 before the product, which would carry it into every layer's sums.
        return torch.cat([part.nan_to_num(0.0, 0.0, 0.0) @ signs for part in parts], 1)


@lru_cache(maxsize=8)
def _signs(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the signs of all layers' sums, channels × 2·layers, scaled to keep variances; 0 for other layers."""
    with torch.inference_mode(False):
        blocks = [
            torch.tensor([[1 - 2 * ((channel & row).bit_count() % 2) for row in ROWS] for channel in range(size)])
            / size**0.5
            for size in sizes
        ]
        return torch.block_diag(*blocks).to(device)


@dataclass(frozen=True)
class Sketch:
    """Mean and covariance of the sketches of a domain's images.

    Attributes:
        mean: one per number.
        deviation: the same.
        correlation: the lower triangle without its diagonal, row by row, in 127ths.
    """

    mean: Tensor
    deviation: Tensor
    correlation: Tensor

    @classmethod
    def of(cls, seen: ImageMoments) -> "Sketch | None":
        """Return the sketch of some images; None where they are too few."""
        if len(seen) < LEAST:
            return None
        rows = numbers(seen).cpu().double()
        deviation = rows.std(0)
        scaled = (rows - rows.mean(0)) / deviation.clamp_min(FLOOR)
        correlation = scaled.T @ scaled / (len(rows) - 1)
        low = torch.tril_indices(len(correlation), len(correlation), offset=-1)
        packed = (127 * correlation[low[0], low[1]]).round().clamp(-127, 127).to(torch.int8)
        return cls(rows.mean(0).float(), deviation.float(), packed)

    @classmethod
    def read(cls, tensors: Mapping[str, Tensor], layers: int) -> "Sketch | None":
        """Return the sketch that a pack holds of so many layers; None where it holds none that fits."""
        parts = [tensors.get(f"sketch.{name}") for name in ("mean", "deviation", "correlation")]
        count = 2 * len(ROWS) * layers
        mean, deviation, correlation = parts
        if mean is None or deviation is None or correlation is None or correlation.dtype != torch.int8:
            return None
        fits = mean.shape == deviation.shape == (count,) and correlation.shape == (count * (count - 1) // 2,)
        return cls(mean.float(), deviation.float(), correlation) if fits and bool((deviation >= 0).all()) else None

    def tensors(self) -> dict[str, Tensor]:
        """Return what a pack holds, by name."""
        return {f"sketch.{name}": tensor for name, tensor in vars(self).items()}

    def covariance(self) -> Tensor:
        """Return the covariance, in float64 on the CPU."""
        count = len(self.mean)
        low = torch.tril_indices(count, count, offset=-1)
        correlation = torch.zeros(count, count, dtype=torch.float64)
        correlation[low[0], low[1]] = self.correlation.cpu().double() / 127
        correlation += correlation.T + torch.eye(count, dtype=torch.float64)
        deviation = self.deviation.cpu().double()
        return correlation * deviation * deviation.unsqueeze(1)


class Discriminant:
    """Tells domains apart by their sketches: the linear discriminant of their shared covariance.

    score = μᵀ C⁻¹ x − ½ μᵀ C⁻¹ μ,   C the mean of the domains' covariances, half of it its diagonal

    One covariance for all keeps a broad domain from taking what belongs to a narrow one.
    """

    def __init__(self, sketches: Sequence[Sketch], device: torch.device) -> None:
        mean = torch.stack([sketch.mean.cpu().double() for sketch in sketches], 1)
        shared = torch.stack([sketch.covariance() for sketch in sketches]).mean(0)
        diagonal = shared.diagonal().clamp_min(1e-4)
        shared = (1 - SHRINK) * shared + torch.diag(diagonal - (1 - SHRINK) * shared.diagonal())
        # Scores are compared among each other only; from their mean on, float32 has digits enough.
        self._centre = mean.mean(1).float().to(device)
        away = mean - mean.mean(1, keepdim=True)
        weights = torch.linalg.solve(shared, away)
        self._weights = weights.float().to(device)
        self._offset = (0.5 * (away * weights).sum(0)).float().to(device)

    def scores(self, seen: ImageMoments) -> Tensor:
        """Return how near images are to each domain, images × domains; the greater, the nearer."""
        rows = numbers(seen) - self._centre
        with without_autocast(rows.device):
            return rows @ self._weights - self._offset
