"""Start low-rank changes in the directions of the first gradient, for the option `mean_start="gradient"`."""

from collections.abc import Callable
from typing import Any

from undrift.posterior.perturbed import Perturbed
from undrift.posterior.state import fill_likelihood, keeping_step, likelihood_state


def turn_to_gradient(model: Perturbed, likelihood: object, gradient: Callable[..., Any]) -> None:
    """Turn each V to the singular vectors of the gradient of the weights, where nothing has moved yet.

    The batch is looked at once more for that, without moving statistics, noise or the likelihood.

    Args:
        gradient: leaves the gradient of the first batch.
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
