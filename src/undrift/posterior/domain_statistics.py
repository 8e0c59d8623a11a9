"""Norm statistics as a posterior: the source's statistics are the prior, images of the domain are the data.

    mean = (w₀ m₀ + w m + n m_b) / (w₀ + w + n),   and the same of second moments

m₀ are the source's statistics, m those of the domain so far, m_b those of a batch of n images. Weights count images.
Kept statistics get the weight of so many images that their mean would scatter by the observed distance. With s² the
variance of single images' means, t² that of their second moments, and d the mean distance over the channels of a layer,

    d = ½ ((m_b − m)²/s² + (v_b − v)²/t²),   w = 1 / (1/most + max(0, d − slack (1/n + 1/most)))

By chance d is 1/n + 1/most: to second order it is KL(batch ‖ kept), in units of a single image's scatter. Statistics
that contradict the batch lose their weight by this alone. The prior and the domain together keep a weight of at least
N₀ images, because the statistics of a few images erase the differences between their classes.

Images of few classes are a fair sample of their domain for the first layers, which react to its colours and noise, but
not for the last ones, which react to classes. If a batch should not count, it counts in the first half of the layers
only. A layer without positions, as in a perceptron, reacts to classes from the start, and takes no such batch.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from undrift.kernels.reference import wide
from undrift.posterior.attached import root_of
from undrift.posterior.perturbed import Perturbed
from undrift.system.private import BatchNorm

MOST = 256.0
"""Images that the source's statistics are worth at most, and those of the domain: weights move, and so does a scene."""

SLACK = 4.0
"""How many times its expectation a distance may be by chance."""

TELLING = 16
"""Images from which on a batch tells what kept statistics are worth; fewer leave it as it was."""

FLOOR, TINY = 1e-4, 1e-12  # the least scatter, as a part of the variance; the least of all

How = Literal["batch", "kept", "again"]
Moments = tuple[Tensor, Tensor]


class LayerStatistics:
    """The statistics of one norm layer: the prior's, the domain's, and those that answer.

    Attributes:
        rows: means and variances; row 0 is the prior's, row 1 the domain's.
        worth: how many images each of them is worth.
    """

    def __init__(self, mean: Tensor, var: Tensor, prior: float) -> None:
        # New tensors each time, never changed in place: a state that was given out stays as it was.
        self.rows: Moments = (torch.stack([mean, mean]), torch.stack([var, var]))
        self.worth = mean.new_tensor([prior, 0.0])
        self._answering: Moments | None = None
        self._batch: tuple[Tensor, Tensor, Tensor, int] | None = None

    def of(self, how: How, x: Tensor, prior: float, early: bool = False) -> Moments:
        """Return mean and variance to normalise a batch by; `early` says whether it is one of the first layers."""
        if how == "again" and self._answering is not None:
            return self._answering
        count = len(x)
        mean, var, scatter = _moments(x)
        worth = self._told((mean, var), scatter, count, prior) if count >= TELLING else self.worth
        if how == "kept" and (not early or x.ndim == 2):
            self._answering = _mixed(self.rows[0], self.rows[1], worth)
            return self._answering
        rows = [torch.cat([kept, own[None]]) for kept, own in zip(self.rows, (mean, var), strict=True)]
        # Padded: a number that the host has would be copied to the device, and waited for.
        self._answering = _mixed(rows[0], rows[1], F.pad(worth, (0, 1), value=float(count)))
        if how == "batch":
            self._batch = mean, var, worth, count
        return self._answering

    @property
    def told(self) -> Tensor | None:
        """What the domain's images are worth now, as the last batch tells, and before it."""
        return None if self._batch is None else torch.stack([self._batch[2][1], self.worth[1]])

    def take(self) -> None:
        """Count the last batch as images of the domain."""
        if self._batch is None:
            return
        (mean, var, worth, count), self._batch = self._batch, None
        sound = var < torch.inf  # false for NaN
        seen = worth[1]
        parts = torch.stack([seen, torch.full_like(seen, count)])
        means, variances = self.rows
        now = _mixed(torch.stack([means[1], mean]), torch.stack([variances[1], var]), parts)
        self.rows = (
            torch.stack([means[0], torch.where(sound, now[0], means[1])]),
            torch.stack([variances[0], torch.where(sound, now[1], variances[1])]),
        )
        self.worth = torch.stack([worth[0], (seen + count).clamp_max(MOST)])

    def _told(self, batch: Moments, scatter: Moments, count: int, prior: float) -> Tensor:
        """Return what each of the kept statistics is worth, as a batch tells."""
        most = torch.stack([torch.full_like(self.worth[0], MOST), self.worth[1]])
        away = [(own - kept).square() / by for own, kept, by in zip(batch, self.rows, scatter, strict=True)]
        distance = 0.5 * (away[0] + away[1]).mean(1)
        beyond = (distance - SLACK * (1 / count + 1 / most)).clamp_min(0)
        worth = (1 / (1 / most + beyond)).nan_to_num(0.0)
        return worth * (prior / worth.sum().clamp_min(TINY)).clamp_min(1.0)


class DomainStatistics:
    """Statistics of all batch norms of a network, for passes that answer; passes with gradients normalise by batch.

    Args:
        prior: N₀, the images that the source's statistics and the domain's are worth together at least.

    Attributes:
        heard: what the last batch told, where the host has read it.
    """

    def __init__(self, prior: int) -> None:
        self.prior = prior
        self.layers: dict[str, LayerStatistics] = {}
        self.heard: list[float] = []

    def start(self, model: Perturbed) -> bool:
        """Take the statistics that the network has as the prior, once; return whether it has any that move."""
        for policy in _tracked(model):
            if policy.name not in self.layers:
                mean, var = (policy.layer._buffers[name] for name in ("running_mean", "running_var"))
                of = wide(mean.dtype)
                self.layers[policy.name] = LayerStatistics(mean.detach().to(of), var.detach().to(of), self.prior)
        return bool(self.layers)

    @contextmanager
    def answering(self, model: Perturbed, how: How) -> Iterator[None]:
        """Normalise by these statistics for the length of a `with` block.

        Args:
            how: "batch" counts the batch of each pass; "kept" does in the first half of the layers only; "again" takes
                those of the last pass.
        """
        if how == "batch":
            self.heard = []
        policies = [(policy, self.layers[policy.name]) for policy in _tracked(model) if policy.name in self.layers]
        try:
            for place, (policy, layer) in enumerate(policies):
                early = 2 * (place + 1) <= len(policies)
                policy.given = lambda x, layer=layer, early=early: layer.of(how, x, self.prior, early)
            yield
        finally:
            for policy, _ in policies:
                policy.given = None

    @property
    def told(self) -> Tensor:
        """What the domain's images are worth now, as the last batch tells, and before it: medians over layers."""
        found = [told for layer in self.layers.values() if (told := layer.told) is not None]
        return torch.stack(found).median(0).values if found else torch.empty(0)

    @torch.no_grad()
    def take(self) -> bool:
        """Count the images of the last pass as seen; return whether they are of another domain than those before.

        They are where the statistics before are worth fewer than N₀ images now, in half of the layers.
        """
        heard, self.heard = self.heard or self.told.tolist(), []
        for layer in self.layers.values():
            layer.take()
        return bool(heard) and heard[1] >= MOST / 2 and heard[0] < self.prior

    def state_dict(self) -> dict[str, Any]:
        """Return all that was seen."""
        return {
            name: {"mean": layer.rows[0], "var": layer.rows[1], "worth": layer.worth}
            for name, layer in self.layers.items()
        }

    def load_state_dict(self, state: Mapping[str, Any], model: Perturbed) -> None:
        """Go on from what was seen."""
        self.layers, self.heard = {}, []
        places = {policy.name: policy.layer.running_mean for policy in _tracked(model)}
        for name, kept in copy.deepcopy(dict(state)).items():
            kept = {part: tensor.to(places[name].device) for part, tensor in kept.items()}
            self.layers[name] = layer = LayerStatistics(kept["mean"][0], kept["var"][0], self.prior)
            layer.rows, layer.worth = (kept["mean"], kept["var"]), kept["worth"]


def _tracked(model: Perturbed) -> list[Any]:
    """Return the policies of batch norms whose kept statistics a step moves.

    A synchronised one has those of a group, and the layers of a compiled network take nothing from outside.
    """
    if root_of(model.net) is not model.net or model.net._compiled_call_impl is not None:
        return []
    return [
        policy
        for policy in model.norms
        if policy.statistics == "train" and isinstance(policy.layer, BatchNorm)
        and type(policy.layer).forward is not nn.SyncBatchNorm.forward
    ]  # fmt: skip


def _moments(x: Tensor) -> tuple[Tensor, Tensor, Moments]:
    """Return mean and variance of a batch, and by how much single images scatter in both, as variances."""
    of, positions = wide(x.dtype), tuple(range(2, x.ndim))
    x = x.detach()
    # Two passes over the input; var_mean takes thirty times as long on a CPU.
    means = x.mean(positions, dtype=of) if positions else x.to(of)
    count = x[0, 0].numel()
    seconds = torch.linalg.vector_norm(x, dim=positions, dtype=of).square() / count if positions else means.square()
    inner = (seconds - means.square()).clamp_min(0)
    between, mean = torch.var_mean(means, dim=0, correction=0)
    spread, var = torch.var_mean(inner + (means - mean).square(), dim=0, correction=0)
    unbiased = len(x) / max(1, len(x) - 1)
    least = FLOOR * var + TINY
    return mean, var, (unbiased * between + least, unbiased * spread + least * var + TINY)


def _mixed(means: Tensor, variances: Tensor, weights: Tensor) -> Moments:
    """Return mean and variance of a mixture of rows."""
    part = weights / weights.sum()
    mean = part @ means
    return mean, part @ (variances + (means - mean).square())
