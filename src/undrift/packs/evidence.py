"""Compute the evidence of a pack for an image: the distance of the image from the moments of the pack's domain.

    e = mean over norm layers of log (mean over channels of KL(N(μ, v) ‖ N(kept mean, kept variance)))

μ and v are an image's own, over positions, at the inputs of the norm layers of the source network; so one pass of that
network compares an image with every pack. The logarithm gives each layer the same weight, whatever its scale. Between
the source and one pack, a layer's weight is how well it separates the pack's own images from the source: `contrast`.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from undrift.packs.moments import ImageMoments, used_channels, watching
from undrift.packs.sketch import VERSION, Sketch
from undrift.posterior.attached import root_of
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.select import plain_name
from undrift.system.private import BatchNorm

FLOOR = 1e-3
"""The least variance of an image's channel, in units of the domain's: a constant one would be infinitely far."""

TINY = 1e-12

OWN_TO_SOURCE = 0.05
"""The most of a pack's own images that may go to the source network."""

FACT = "moments"
"""Under which name a pack says which layers its moments are of."""


@dataclass(frozen=True)
class DomainMoments:
    """Mean and variance of a domain, at the inputs of the source network's norm layers.

    Attributes:
        layers: the layers, in the order of the pass, and how many channels of each are used.
        mean: of all these channels, one row.
        var: over positions and images.
        images: how many they were taken from; 0 for a network's own running statistics, which do not say.
        level: the mean evidence of the domain's own images; `spread`: its standard deviation. None where unknown.
        weights: of the layers, where the domain is compared with the source; they sum to 1. None: all the same.
        threshold: how much nearer than the source an image has to be, with these weights; 0 or less.
        sketch: of the domain's images, by which packs are told apart.
    """

    layers: Mapping[str, int]
    mean: Tensor
    var: Tensor
    images: int = 0
    level: float | None = None
    spread: float | None = None
    weights: Tensor | None = None
    threshold: float = 0.0
    sketch: Sketch | None = None

    @classmethod
    def of_source(cls, net: nn.Module) -> "DomainMoments | None":
        """Return a source network's own moments, the running statistics of its batch norms; None without these."""
        kept = {
            plain_name(name): layer
            for name, layer in net.named_modules()
            if isinstance(layer, BatchNorm) and layer.running_mean is not None and layer.running_var is not None
        }
        if not kept:
            return None
        few = {name: used_channels(layer.num_features) for name, layer in kept.items()}
        mean, var = (
            torch.cat([getattr(layer, part).detach().float()[few[name]] for name, layer in kept.items()])
            for part in ("running_mean", "running_var")
        )
        return cls({name: len(channels) for name, channels in few.items()}, mean, var)

    @classmethod
    def read(cls, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> "DomainMoments | None":
        """Return the moments that a pack holds; None where it holds none, or such as this version does not know."""
        try:
            described = facts[FACT]
            layers = {str(name): int(size) for name, size in described["layers"].items()}
            mean, var = tensors["mean"].float(), tensors["var"].float()
            level, spread = (float(value) for value in tensors["evidence"])
            images = int(described["images"])
        except (KeyError, TypeError, ValueError, AttributeError):
            return None
        sizes = sum(layers.values())
        if not layers or min(layers.values()) < 1 or mean.shape != (sizes,) or var.shape != (sizes,) or spread <= 0:
            return None
        weights = tensors.get("weights")
        if weights is not None:
            sound = weights.shape == (len(layers),) and bool((weights >= 0).all()) and float(weights.sum()) > 0
            weights = weights.float() if sound else None
        least = tensors.get("threshold")
        threshold = 0.0 if least is None or weights is None or least.numel() != 1 else min(0.0, float(least))
        sketch = Sketch.read(tensors, len(layers)) if described.get("sketch") == VERSION else None
        return cls(layers, mean, var, images, level, spread, weights, threshold, sketch)

    def put(self, model: Perturbed) -> None:
        """Let a model's pack hold these moments."""
        if self.level is None or self.spread is None:
            return
        rows = {"mean": self.mean, "var": self.var, "evidence": torch.tensor([self.level, self.spread])}
        fact: dict[str, Any] = {"layers": dict(self.layers), "images": self.images}
        if self.weights is not None:
            rows |= {"weights": self.weights, "threshold": torch.tensor([self.threshold])}
        if self.sketch is not None:
            rows |= self.sketch.tensors()
            fact["sketch"] = VERSION
        model.router = {name: row.detach().cpu() for name, row in rows.items()}
        model.facts[FACT] = fact

    def state(self) -> dict[str, Any]:
        """Return the moments as plain values and tensors; the reverse of `of_state`."""
        sketch = None if self.sketch is None else dict(vars(self.sketch))
        return {**vars(self), "layers": dict(self.layers), "sketch": sketch}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> "DomainMoments":
        """Return the moments of a state."""
        sketch = state.get("sketch")
        return cls(**{**state, "sketch": None if sketch is None else Sketch(**sketch)})

    def to(self, device: torch.device) -> "DomainMoments":
        """Return the moments on a device."""
        weights = None if self.weights is None else self.weights.to(device)
        return replace(self, mean=self.mean.to(device), var=self.var.to(device), weights=weights)

    def only(self, layers: Sequence[str]) -> "DomainMoments":
        """Return the moments of some of the layers, in that order; a sketch is of all of them."""
        if list(layers) == list(self.layers):
            return self
        mean, var = (_picked(part, self.layers, layers) for part in (self.mean, self.var))
        own = list(self.layers)
        weights = None if self.weights is None else self.weights[[own.index(name) for name in layers]]
        fewer = {name: self.layers[name] for name in layers}
        return replace(self, layers=fewer, mean=mean, var=var, weights=weights, sketch=None)

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


def common_layers(moments: Sequence[DomainMoments]) -> list[str]:
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

    def state_dict(self) -> dict[str, Any]:
        """Return what was gathered, for a stream that resumes."""
        return copy.deepcopy(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what was gathered."""
        vars(self).update(copy.deepcopy(dict(state)))

    def moments(self, whole: bool = False, source: DomainMoments | None = None) -> DomainMoments | None:
        """Return what was gathered; None where no image was.

        Args:
            whole: with what a router asks of a pack beside the moments: the weights of layers, and a sketch.
            source: the source network's moments, which the weights compare with.
        """
        if self._sums is None or not self.images:
            return None
        found = self._without(0, 0, 0)
        if len(self._kept) < 2:
            return found
        own = ImageMoments(self._layers, *(torch.stack(part) for part in zip(*self._kept, strict=True)))
        # Each image is compared with all others: few images are near their own mean, and no other image is.
        wide = own.mean.to(self._sums[0])
        others = self._without(wide, own.var.nan_to_num(0.0).to(wide) + wide.square(), 1)
        by_layer = others.by_layer(own).log().double()
        evidence = by_layer.mean(1)
        known = replace(found, level=float(evidence.mean()), spread=max(float(evidence.std()), 1e-3))
        if not whole:
            return known
        weights, threshold = contrast(by_layer, own, source) or (None, 0.0)
        return replace(known, weights=weights, threshold=threshold, sketch=Sketch.of(own))

    def _without(self, mean: Tensor | int, square: Tensor | int, images: int) -> DomainMoments:
        """Return the moments of the domain without some images, a row for each row of their sums."""
        assert self._sums is not None, "images were gathered"
        count = self.images - images
        rest, squares = ((whole - part) / count for whole, part in zip(self._sums, (mean, square), strict=True))
        return DomainMoments(self._layers, rest.float(), (squares - rest.square()).clamp_min(0).float(), count)


def contrast(own: Tensor, seen: ImageMoments, source: DomainMoments | None) -> tuple[Tensor, float] | None:
    """Return the weights of layers that tell a domain's images from the source's, and the least sum; None if none does.

        weight = max(0, mean over images of d) / variance of d,   d = log KL to the source − log KL to the domain

    The weights sum to 1. A domain's images are known, the source's are not: so the sum of weight · d need not be
    positive, but as large as that of 95 % of the domain's own images. Where this takes in images of the source, the two
    domains are near, and the adapted network knows them too.

    Args:
        own: log KL of the images to their own domain, images × layers.
        seen: the images.
        source: the source's moments; without any there is nothing to weigh.
    """
    if source is None or not set(source.layers) & set(seen.layers):
        return None
    names = [name for name, size in seen.layers.items() if source.layers.get(name) == size]
    away = source.to(seen.mean.device).only(names).by_layer(seen).log().double()
    columns = [list(seen.layers).index(name) for name in names]
    apart = away - own[:, columns]
    weights = torch.zeros(len(seen.layers), dtype=torch.float64, device=apart.device)
    weights[columns] = apart.mean(0).clamp_min(0) / apart.var(0).clamp_min(1e-6)
    whole = float(weights.sum())
    if whole <= 0:
        return None
    weights /= whole
    return weights.float(), min(0.0, float((apart @ weights[columns]).quantile(OWN_TO_SOURCE)))


def sigmas_away(evidence: Tensor, moments: DomainMoments) -> Tensor:
    """Return how many standard deviations further than a domain's own images these are; NaN where that is unknown."""
    if moments.level is None or moments.spread is None:
        return torch.full_like(evidence, math.nan)
    return (evidence - moments.level) / moments.spread


KEPT_STATISTICS = "kept_statistics"
"""The fact that a pack with batch statistics holds those of its whole domain, too."""


def set_facts(model: Perturbed, **facts: object) -> None:
    """Replace the facts of a model's pack by these; keep those about moments and statistics."""
    kept = {name: model.facts[name] for name in (FACT, KEPT_STATISTICS) if name in model.facts}
    model.facts = {**facts, **kept}


def has_moments(model: Perturbed) -> bool:
    """Return whether the model's pack will hold moments of its domain."""
    return FACT in model.facts


@contextmanager
def gathering_moments(model: Perturbed, eager: bool = False) -> Iterator[Callable[[], None]]:
    """Gather moments during passes of the source network; call the yielded function after each pass.

    Args:
        eager: whether the passes are of the network itself where it is compiled, whose graph hears of no new hooks.
    """
    gathering = Gathering()
    model.facts.pop(FACT, None)
    if root_of(model.net) is not model.net and not eager:
        yield lambda: None
        return
    with watching(root_of(model.net)) as watch:

        def add() -> None:
            seen = watch.moments()
            if seen is not None:
                seen = replace(seen, mean=model.key.whole(seen.mean), var=model.key.whole(seen.var))
            gathering.add(seen)

        yield add
    source = DomainMoments.of_source(root_of(model.net))
    if (moments := gathering.moments(whole=True, source=source)) is not None:
        moments.put(model)
