"""The prior of the perturbation, and the start of its variances."""

import torch
from torch import Tensor, nn

from undrift.options import Options
from undrift.posterior.layers import kernels


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
