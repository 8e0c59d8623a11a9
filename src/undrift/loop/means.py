"""Move the means of weights beside the gradient: a start for low-rank ones, and the KL's pull in closed form."""

from collections.abc import Callable
from typing import Any

import torch

from undrift.posterior.kl_parts import trained_means
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.state import fill_likelihood, keeping_step, likelihood_state


def turn_to_gradient(model: Perturbed, likelihood: object, gradient: Callable[..., Any]) -> None:
    """Turn each V to the singular vectors of the weights' first gradient, for the option `mean_start="gradient"`.

    This takes one more pass over the batch, without changing statistics, noise or the likelihood.

    Args:
        gradient: computes the gradient of the first batch.
    """
    changes = model.changes()
    if any(bool(change.left.any()) for change in changes):
        return  # a run that goes on, or a model that was loaded
    before = likelihood_state(likelihood)
    try:
        with keeping_step(model.key):
            for change in changes:
                change.probe()
            gradient(climbed=True)
    finally:
        for change in changes:
            change.start_from_probe()
        fill_likelihood(likelihood, before, model)


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
