"""Pull trained weights towards the source's: the KL's term for the mean, solved in closed form."""

import torch

from undrift.posterior.joined import trained_means
from undrift.posterior.perturbed import Perturbed


@torch.no_grad()
def pull(model: Perturbed, optimiser: torch.optim.Optimizer, size: int) -> None:
    """Move each trained mean to where the KL wants it after a step, for the option `kl_mean="closed"`.

    A step of rate η on the objective's λ (w − w_s)² / (2 prior_var n) alone, taken implicitly:

        w ← w_s + (w − w_s) / (1 + η λ / (prior_var n))

    Its gradient is stiff: a kernel that hardly varies has a prior variance near 0, and SGD diverges on it at any
    useful rate. The implicit step is stable for every rate. Momentum 0.9 makes ten steps of one, so η is the rate over
    (1 − momentum).

    A low-rank change U Vᵀ is drawn to 0 by U, whose rows are the kernels'.

    Args:
        size: n, the data size of the bound.
    """
    options = model.options
    if options.kl_mean != "closed" or options.kl_weight == 0:
        return
    rates = {
        id(p): group["lr"] / (1 - group.get("momentum", 0)) for group in optimiser.param_groups for p in group["params"]
    }
    means = list(trained_means(model))
    count = size if options.kl_reduction == "bound" else max(1, sum(noise.weights for noise in model.noises()))
    for _, prior_var, parameter, start in means:
        if (rate := rates.get(id(parameter), 0.0)) > 0:
            parameter.copy_(start + (parameter - start) / (1 + rate * options.kl_weight / (prior_var * count)))
