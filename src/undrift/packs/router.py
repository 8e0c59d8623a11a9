"""Choose a pack for each image by the moments of its domain, without labels or source images.

The nearest pack is chosen by their sketches, or by evidence if one of them has no sketch. Then the evidence of this
pack and of the source, with the pack's own weights of layers, decides which of the two answers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from undrift.packs.evidence import DomainMoments, common_layers, sigmas_away
from undrift.packs.moments import ImageMoments
from undrift.packs.sketch import Discriminant

SOURCE = "source"

LIMIT = 3.0
"""Standard deviations beyond which a pack does not know an image. Of images of their own domain, packs refuse under 1 %
there (docs/explanation/routing.md)."""


@dataclass(frozen=True)
class Routes:
    """Which network each image of a batch belongs to.

    Attributes:
        evidence: images × networks, the smaller the nearer, all layers alike; NaN where a network has no moments. The
            choice weighs them otherwise, so the least is not always the nearest.
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
        packs = {number: kept for number, kept in self.moments.items() if number}
        sketches = [kept.sketch for kept in packs.values() if kept.sketch is not None]
        self._discriminant: Discriminant | None = None
        if 1 < len(packs) == len(sketches) and len({tuple(kept.layers.items()) for kept in packs.values()}) == 1:
            self._discriminant = Discriminant(sketches, device)
            self._order = tuple(next(iter(packs.values())).layers.items())

    @property
    def can_choose(self) -> bool:
        """Whether some pack has moments to compare with."""
        return any(self.compared)

    def routes(self, seen: ImageMoments, limit: float = LIMIT) -> Routes:
        """Return which network each image belongs to."""
        evidence = seen.mean.new_full((len(seen), len(self.names)), math.nan)
        sigmas, by_layer = evidence.clone(), dict[int, Tensor]()
        for number, kept in self.compared.items():
            by_layer[number] = kept.by_layer(seen).log()
            evidence[:, number] = by_layer[number].mean(1)
            whole = self.moments[number]
            own = evidence[:, number] if whole.layers.keys() == kept.layers.keys() else whole.evidence(seen)
            sigmas[:, number] = sigmas_away(own, whole)
        nearest = self._away(evidence, seen).argmin(1)
        if 0 in by_layer:
            rows = torch.arange(len(seen), device=nearest.device)
            leads = [self._lead(by_layer[0], by_layer[number], number) for number in by_layer if number]
            lead = evidence.new_full(evidence.shape, -math.inf)
            lead[:, [number for number in by_layer if number]] = torch.stack(leads, 1)
            nearest = torch.where(lead[rows, nearest] > 0, nearest, 0)
        known = ~(sigmas.gather(1, nearest[:, None])[:, 0] > limit)  # also where the source is nearest: NaN
        return Routes(evidence, sigmas, torch.where(known, nearest, 0), nearest, known)

    def pack_of_all(self, seen: ImageMoments) -> str:
        """Return the name of the pack nearest to images of one domain, taken together."""
        evidence = seen.mean.new_full((len(seen), len(self.names)), math.nan)
        for number, kept in self.compared.items():
            evidence[:, number] = kept.evidence(seen)
        return self.names[int(self._away(evidence, seen).mean(0).argmin())]

    def _away(self, evidence: Tensor, seen: ImageMoments) -> Tensor:
        """Return how far images are from each pack, images × networks; infinitely from the source."""
        away = evidence.nan_to_num(nan=math.inf)
        if self._discriminant is not None and tuple(seen.layers.items()) == self._order:
            away[:, [number for number in self.moments if number]] = -self._discriminant.scores(seen)
        away[:, 0] = math.inf
        return away

    def _lead(self, source: Tensor, own: Tensor, number: int) -> Tensor:
        """Return by how much images are nearer to a pack than to the source."""
        apart, kept = source - own, self.compared[number]
        if kept.weights is None or not bool(kept.weights.sum() > 0):
            return apart.mean(1)
        return (apart * kept.weights).sum(1) / kept.weights.sum() - kept.threshold
