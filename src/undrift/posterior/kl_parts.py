"""What the KL is computed from: all log-variances as one row, and the means that are trained.

One row takes few launches, where a network has a hundred log-variances.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from undrift.kernels import share
from undrift.posterior.layers import channels, is_standard, kernels, per_weight
from undrift.posterior.noise import Noise, prior_row
from undrift.posterior.perturbed import Perturbed


class VarianceRow(NamedTuple):
    """The variances of some weights, each with its prior and half the number of weights behind it."""

    log_var: Tensor
    log_prior: Tensor
    half_weights: Tensor


def variance_rows(model: Perturbed, row: Tensor | None = None) -> list[VarianceRow]:
    """Return a row for each device and dtype; `row` holds all log-variances, where `share_row` has made one."""
    noises, prior = model.noises(), model.prior
    if row is not None:
        if prior is None or torch.compiler.is_compiling():
            return [VarianceRow(row, *prior_row(noises))]
        return [VarianceRow(row, prior.log_prior, prior.half_weights)]
    places: dict[object, tuple[list[Noise], list[Tensor]]] = {}
    for noise in noises:
        log_var = noise.log_var
        there, log_vars = places.setdefault((log_var.device, log_var.dtype), ([], []))
        there.append(noise)
        log_vars.append(log_var if log_var.ndim == 1 else log_var.flatten())
    if len(places) == 1 and prior is not None and (prior.log_prior.device, prior.log_prior.dtype) in places:
        return [VarianceRow(torch.cat(log_vars), prior.log_prior, prior.half_weights)]
    return [VarianceRow(torch.cat(log_vars), *prior_row(there)) for there, log_vars in places.values()]


class TrainedMean(NamedTuple):
    """The mean of a weight that is both perturbed and trained.

    Attributes:
        change: how far the mean of q is from the prior's, the source's weight.
        prior_var: the prior's variances.
        parameter: what moves it, and `start`, what that is where the change is 0. Both broadcast against `prior_var`.
    """

    change: Tensor
    prior_var: Tensor
    parameter: nn.Parameter
    start: Tensor


def trained_means(model: Perturbed) -> Iterator[TrainedMean]:
    """Yield the mean of each weight that is both perturbed and trained."""
    held = {id(part.layer): part for part in model.trained}
    changed = {(id(layer), name): change for layer, name, change in model.changed}
    for noise, layer, name in model.weights if held or changed else ():
        part, now, prior = held.get(id(layer)), layer._parameters.get(name), noise.prior_var
        if low_rank := changed.get((id(layer), name)):
            # A row of U for each kernel; weights of one kernel have one prior.
            rows = kernels(layer, prior)[:, :1] if noise.sharing == "weight" else prior[:, None]
            yield TrainedMean(low_rank.rows(), rows, low_rank.left, torch.zeros_like(rows))
        elif now is not None and part is not None and (source := part.away.get(name)) is not None:
            spread = per_weight(layer, prior, now) if noise.sharing == "kernel" else prior
            yield TrainedMean(now - source, spread, now, source)


def share_row(model: Perturbed) -> Tensor | None:
    """Return all log-variances as one row that the KL shares with the next pass's noise; None where nothing is gained.

    Both give the row one gradient, where each log-variance would have two to be added: a launch for each layer.
    Uncompiled code splits the row among the layers; a graph that is compiled for CUDA has kernels of its own for this.
    """
    if model.options.estimator != "local" or not model.key.enabled or not model.key.noisy:
        return None  # nobody would ask for a part
    own: list[Tensor] = [noise.log_var for noise in model.noises()]
    if len({(v.device, v.dtype, v.requires_grad, v.ndim) for v in own}) != 1 or own[0].ndim != 1:
        return None
    if not torch.compiler.is_compiling():
        row = torch.cat(own)
        model.key.next_parts = row.split([len(v) for v in own])
        return row
    groups, last = zip(*[_arrangement(layer) for _, layer, _ in model.weights], strict=True)
    found = share(own, list(groups), list(last))
    if found is None:
        return None
    row, model.key.next_handles = found
    return row


def _arrangement(layer: nn.Module) -> tuple[int, bool]:
    """Return the groups of a layer's channels, and whether these are likely to be neighbours in its output's memory."""
    if not is_standard(layer):
        return 0, False  # its weights are drawn, and leave nothing to be added up
    last, groups = channels(layer)
    weight = layer._parameters.get("weight")
    ordered = weight is not None and weight.ndim == 4 and weight.is_contiguous(memory_format=torch.channels_last)
    return groups, last or ordered
