"""The objective of paper eq. 3: a likelihood of the unlabelled data, and the KL to the prior.

loss = E[−log p(D | w_s + Δw)] + KL[q(Δw) || p(Δw)] / size,   q = N(0, exp(log_var)),  p = N(0, prior_var)
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from undrift._errors import OptionError, UndriftError
from undrift.likelihood.entropy import entropy
from undrift.posterior.kl_parts import TrainedMean, share_row, trained_means, variance_rows
from undrift.posterior.outputs import logits
from undrift.posterior.perturbed import Perturbed
from undrift.system.validate import a_type


def kl(model: Perturbed, reduction: Literal["mean", "sum"] = "mean") -> Tensor:
    """Return KL[q(Δw) || p(Δw)] per perturbed weight (first term of paper eq. 3), in closed form.

    0.5 * (log prior_var - log_var - 1 + exp(log_var) / prior_var)

    Every weight counts, even if several share a variance. "mean" divides by the number of perturbed weights, "sum" is
    the KL of the whole network; without noise the KL is 0. If weights are trained too (option `train`), the mean of q
    moves away from the prior's mean, the source weight, and (w − w_s)² / (2 prior_var) is added.
    """
    _check(model)
    if reduction not in ("mean", "sum"):
        raise OptionError(
            f"reduction={reduction!r} is not one of mean, sum. Take mean for the KL of a weight, sum for the network's."
        )
    return _kl(model, reduction)


def _kl(model: Perturbed, reduction: str, row: Tensor | None = None) -> Tensor:
    noises = model.noises()
    parts = [gaussian_kl(*variances) for variances in variance_rows(model, row)]
    shifts = [mean_kl(mean) for mean in trained_means(model)]
    # In closed form the pull comes after the step (loop/optimise.py) and not from this gradient.
    parts += [part.detach() for part in shifts] if model.options.kl_mean == "closed" else shifts
    place = model.key.step  # devices may differ; the sum is taken where the noise's counter is
    total = place.new_zeros((), dtype=torch.float32) if not parts else parts[0].to(place.device)
    for part in parts[1:]:
        total = total + part.to(place.device)
    return total / max(1, sum(noise.weights for noise in noises)) if reduction == "mean" else total


def gaussian_kl(log_var: Tensor, log_prior: Tensor, half_weights: Tensor) -> Tensor:
    """Return Σ n/2 · (exp(r) − 1 − r) with r = log_var − log_prior: the KL of n weights behind each variance."""
    ratio = log_var - log_prior
    # A variance of exactly 0 (init_fraction=0) is no perturbation and has no KL.
    random = ratio > -torch.inf
    ratio = torch.where(random, ratio, 0)
    return (torch.where(random, ratio.exp() - 1 - ratio, 0) * half_weights).sum()


def mean_kl(mean: TrainedMean) -> Tensor:
    """Return Σ (w − w_s)² / (2 prior_var): the KL of a mean that moved."""
    return (mean.change.square() / (2 * mean.prior_var)).sum()


def kl_term(model: Perturbed, size: int | Tensor | None = None) -> Tensor:
    """Return the KL as the objective adds it to a loss that is a mean over samples.

    The paper's eq. 3 writes E[p(D|Δw)] for the expected likelihood. The bound needs its logarithm, E[log p(D|Δw)], so
    the unsupervised loss, a mean over samples, takes the place of −log p:

        loss + kl_weight · KL_sum / size        kl_reduction="bound", the true bound with kl_weight 1
        loss + kl_weight · KL_mean              kl_reduction="mean", as released (kl_weight 0.01)

    Args:
        model: a perturbed network; its options say which of the two.
        size: number of samples in the data set (in a stream, seen so far); needed for the bound. A tensor is not
            checked, because reading it would wait for the GPU.
    """
    _check(model)
    return _term(model, size)


def _term(model: Perturbed, size: int | Tensor | None, row: Tensor | None = None) -> Tensor:
    weight = model.options.kl_weight
    if model.options.kl_reduction == "mean":
        return weight * _kl(model, "mean", row)
    if size is None or (not isinstance(size, Tensor) and size < 1):
        raise OptionError(f'size={size!r}: kl_reduction="bound" divides by the number of samples. Give it, at least 1.')
    total = _kl(model, "sum", row)
    return (total if weight == 1 else weight * total) / size  # times 1 would be another launch


def step_loss(
    model: Perturbed,
    images: Tensor,
    size: int | Tensor | None = None,
    likelihood: Callable[[Tensor], Tensor] = entropy,
) -> Tensor:
    """Return the loss of a step on one batch (paper eq. 3): the likelihood of one noisy pass, and the KL.

    likelihood(model(images)) + kl_term(model, size)

    A compiled step on CUDA with one variance per kernel everywhere (`linear_sharing="kernel"`) is faster with this
    function than with the expression above, because the gradients of noise and KL are computed together.

    Args:
        model: a perturbed network.
        images: a batch. An image with NaN or infinity makes the loss non-finite; `adapt` and `stream` skip such images,
            and your own loop has to check.
        size: as in `kl_term`.
        likelihood: a loss of the logits (float32 or better). Likelihoods that use more of a step (`Shot`,
            `Consistency`) work in `adapt` and `stream` only.

    Examples:
        >>> import undrift
        >>> model = undrift.perturb(torch.nn.Linear(3, 2), init_fraction=1)
        >>> images = torch.ones(4, 3)
        >>> bool(step_loss(model, images, size=4) > 0)
        True
    """
    _check(model)
    row = share_row(model)  # in a compiled graph for CUDA: the log-variances as one row, for noise and KL together
    return likelihood(logits(model(images), model.options.outputs)) + _term(model, size, row)


def _check(model: object) -> None:
    if not isinstance(model, Perturbed):
        raise UndriftError(f"got {a_type(model)}; a KL needs a perturbed network. Pass the result of undrift.perturb.")
