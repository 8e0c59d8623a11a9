"""The prior of the perturbation, and the start of its variances."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from undrift.options import Options
from undrift.posterior.layers import kernels

if TYPE_CHECKING:
    from undrift.posterior.noise import Noise


def kernel_variance(layer: nn.Module, weight: Tensor, floor: float) -> Tensor:
    """Return Var(w_s^li), one per kernel (per row of a linear layer), at least `floor`.

    A constant kernel, or one of a single weight, has no variance; the floor keeps log-variances and the KL finite.
    """
    rows = kernels(layer, weight.to(torch.promote_types(weight.dtype, torch.float32)))
    variance = rows.var(dim=1) if rows.shape[1] > 1 else rows.new_zeros(rows.shape[0])
    return variance.clamp_min(floor)


def prior_variance(variance: Tensor, options: Options) -> Tensor:
    """Return the prior variance per kernel: λ·Var(w_s^li) (paper eq. 8), or one isotropic λ for the whole network."""
    if options.prior == "isotropic":
        return torch.full_like(variance, options.prior_scale)
    return options.prior_scale * variance


def initial_log_var(variance: Tensor, options: Options) -> Tensor:
    """Return the initial log-variance per kernel; a fraction of 0 gives −inf, which is exactly no noise."""
    if options.init == "prior":
        return prior_variance(variance, options).log()
    return (options.init_fraction * variance + options.init_offset).log()


class PriorRow(nn.Module):
    """The logarithm of each variance's prior, and half the number of weights behind it, of all noises as one row.

    They stay what they are, so the KL need not gather them from a hundred layers in each step.
    """

    log_prior: Tensor
    half_weights: Tensor

    def __init__(self, noises: Sequence["Noise"]) -> None:
        super().__init__()
        log_prior, half_weights = prior_row(noises)
        self.register_buffer("log_prior", log_prior, persistent=False)
        self.register_buffer("half_weights", half_weights, persistent=False)


def prior_row(noises: Sequence["Noise"]) -> tuple[Tensor, Tensor]:
    """Return the logarithm of each variance's prior, and half the number of weights behind it."""
    log_prior = torch.cat([n.prior_var.expand_as(n.log_var).flatten() for n in noises]).log()
    return log_prior, 0.5 * torch.cat([n.share.expand(n.log_var.numel()) for n in noises])
