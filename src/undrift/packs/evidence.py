"""Compare images with the moments of a domain: how well does a pack know an image?

    e = mean over norm layers of log (mean over channels of KL(N(μ, v) ‖ N(kept mean, kept variance)))

μ and v are an image's own, over positions, at the inputs of the norm layers of the source network; so one pass of that
network compares an image with every pack. The logarithm gives each layer the same say, whatever its scale.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from undrift.packs.moments import ImageMoments
from undrift.posterior.select import plain_name
from undrift.system.private import BatchNorm

FLOOR = 1e-3
"""The least variance of an image's channel, in units of the domain's: a constant one would be infinitely far."""

TINY = 1e-12


@dataclass(frozen=True)
class Moments:
    """Mean and variance of a domain, at the inputs of the source network's norm layers.

    Attributes:
        layers: the layers, in the order of the pass, and how many channels each has.
        mean: of all layers' channels, one row.
        var: over positions and images.
        images: how many they were taken from; 0 for a network's own running statistics.
        level: the mean evidence of the domain's own images; `spread`: its standard deviation. None where unknown.
    """

    layers: Mapping[str, int]
    mean: Tensor
    var: Tensor
    images: int = 0
    level: float | None = None
    spread: float | None = None

    @classmethod
    def of_source(cls, net: nn.Module) -> "Moments | None":
        """Return a source network's own moments, the running statistics of its batch norms; None without these."""
        kept = {
            plain_name(name): layer
            for name, layer in net.named_modules()
            if isinstance(layer, BatchNorm) and layer.running_mean is not None and layer.running_var is not None
        }
        if not kept:
            return None
        mean, var = (
            torch.cat([getattr(layer, name).detach().float() for layer in kept.values()])
            for name in ("running_mean", "running_var")
        )
        return cls({name: layer.num_features for name, layer in kept.items()}, mean, var)

    def calibrated(self, own: ImageMoments) -> "Moments":
        """Return these moments with level and spread of the evidence of the domain's own images."""
        if len(own) < 2:
            return self
        evidence = self.evidence(own).double()
        return replace(self, level=float(evidence.mean()), spread=max(float(evidence.std()), 1e-3))

    def to(self, device: torch.device) -> "Moments":
        """Return the moments on a device."""
        return replace(self, mean=self.mean.to(device), var=self.var.to(device))

    def only(self, layers: Sequence[str]) -> "Moments":
        """Return the moments of some of the layers, in that order."""
        return replace(
            self,
            layers={name: self.layers[name] for name in layers},
            **{name: _picked(getattr(self, name), self.layers, layers) for name in ("mean", "var")},
        )

    def evidence(self, seen: ImageMoments) -> Tensor:
        """Return for each image how far it is from this domain: the smaller, the better known."""
        return self.by_layer(seen).log().mean(1)

    @torch.no_grad()
    def by_layer(self, seen: ImageMoments) -> Tensor:
        """Return the mean KL over the channels of each layer, images × layers."""
        mean, var = (
            part if list(seen.layers) == list(self.layers) else _picked(part, seen.layers, list(self.layers))
            for part in (seen.mean, seen.var)
        )
        kept = self.var.clamp_min(TINY)
        away = (mean - self.mean).square() / kept
        ratio = (var / kept).clamp_min(FLOOR)
        # One position has no variance: only its mean can be compared.
        kl = 0.5 * torch.where(var.isnan(), away, ratio - ratio.log() - 1 + away)
        kl = kl.nan_to_num(nan=1e6, posinf=1e6).clamp_max(1e6)
        parts = kl.split(list(self.layers.values()), dim=1)
        return torch.stack([part.mean(1) for part in parts], 1).clamp_min(1e-6)


def common_layers(moments: Sequence[Moments]) -> list[str]:
    """Return the layers that all of these know: evidence is compared on the same ones."""
    first, *rest = moments
    return [name for name, size in first.layers.items() if all(other.layers.get(name) == size for other in rest)]


def _picked(rows: Tensor, have: Mapping[str, int], wanted: Sequence[str]) -> Tensor:
    parts = dict(zip(have, rows.split(list(have.values()), dim=-1), strict=True))
    return torch.cat([parts[name] for name in wanted], -1)


class Gathering:
    """Gathers the moments of a domain, batch by batch.

    Some of the images, from all over the domain, are kept to find out how far a domain's own images are from it.
    """

    MOST = 256  # images kept: ten thousands of channels each

    def __init__(self) -> None:
        self.images = 0
        self._layers: Mapping[str, int] = {}
        self._sums: tuple[Tensor, Tensor] | None = None
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._stride, self._next = 1, 0

    @torch.no_grad()
    def add(self, seen: ImageMoments | None) -> None:
        """Take in a batch; one with other layers than the first is left out."""
        if seen is None or (self._sums is not None and dict(seen.layers) != dict(self._layers)):
            return
        sound = seen.mean.isfinite().all(1)
        mean, var = seen.mean[sound], seen.var[sound]
        wide = mean.double() if mean.device.type != "mps" else mean
        sums = wide.sum(0), (var.nan_to_num(0.0).to(wide) + wide.square()).sum(0)
        self._layers = seen.layers
        self._sums = sums if self._sums is None else (self._sums[0] + sums[0], self._sums[1] + sums[1])
        while self._next < len(mean):
            self._kept.append((mean[self._next], var[self._next]))
            self._next += self._stride
            if len(self._kept) > self.MOST:
                self._kept, self._stride = self._kept[::2], 2 * self._stride
        self._next -= len(mean)
        self.images += len(mean)

    def moments(self) -> Moments | None:
        """Return what was gathered; None where no image was."""
        if self._sums is None or not self.images:
            return None
        mean, square = (total / self.images for total in self._sums)
        found = Moments(self._layers, mean.float(), (square - mean.square()).clamp_min(0).float(), self.images)
        return found.calibrated(ImageMoments(self._layers, *(torch.stack(p) for p in zip(*self._kept, strict=True))))


def sigmas_away(evidence: Tensor, moments: Moments) -> Tensor:
    """Return how many standard deviations further than a domain's own images these are; NaN where that is unknown."""
    if moments.level is None or moments.spread is None:
        return torch.full_like(evidence, math.nan)
    return (evidence - moments.level) / moments.spread
