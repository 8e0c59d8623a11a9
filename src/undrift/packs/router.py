"""Choose a pack for each image by the moments of its domain, without labels or source images."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from undrift.packs.evidence import DomainMoments, common_layers, sigmas_away
from undrift.packs.moments import ImageMoments

SOURCE = "source"

LIMIT = 3.0
"""Standard deviations beyond which a pack does not know an image. Of images of their own domain, packs refuse under 1 %
there (docs/explanation/routing.md)."""


@dataclass(frozen=True)
class Routes:
    """Which network each image of a batch belongs to.

    Attributes:
        evidence: images × networks, the smaller the nearer; NaN where a network has no moments.
        sigmas: how many standard deviations further than a pack's own images; NaN for the source network.
        choice: number of the network that answers, 0 for the source.
        nearest: number of the nearest network.
        known: whether the nearest network knows the image; if not, the source answers.
    """

    evidence: Tensor
    sigmas: Tensor
    choice: Tensor
    nearest: Tensor
    known: Tensor


class Router:
    """Compares the moments of images with those of each network.

    Args:
        moments: by name, the source's first; None for a network that has none.
    """

    def __init__(self, moments: Mapping[str, DomainMoments | None], device: torch.device) -> None:
        self.names, self.device = tuple(moments), device
        self.moments = {number: kept.to(device) for number, kept in enumerate(moments.values()) if kept is not None}
        # What is compared has to be seen by all; how far an image is from one pack, that pack says alone.
        layers = common_layers(list(self.moments.values())) if self.moments else []
        self.compared = {number: kept.only(layers) for number, kept in self.moments.items()} if layers else {}

    @property
    def can_choose(self) -> bool:
        """Whether some pack has moments to compare with."""
        return any(self.compared)

    def routes(self, seen: ImageMoments, limit: float = LIMIT) -> Routes:
        """Return which network each image belongs to: the one with the least evidence of another domain."""
        evidence = seen.mean.new_full((len(seen), len(self.names)), math.nan)
        sigmas = evidence.clone()
        for number, kept in self.compared.items():
            evidence[:, number] = kept.evidence(seen)
            whole = self.moments[number]
            own = evidence[:, number] if whole.layers.keys() == kept.layers.keys() else whole.evidence(seen)
            sigmas[:, number] = sigmas_away(own, whole)
        nearest = evidence.nan_to_num(nan=math.inf).argmin(1)
        known = ~(sigmas.gather(1, nearest[:, None])[:, 0] > limit)  # also where the source is nearest: NaN
        return Routes(evidence, sigmas, torch.where(known, nearest, 0), nearest, known)
