"""Collect norm statistics of a domain before a likelihood's first pass over it."""

from undrift._errors import OptionError
from undrift._types import Batches
from undrift.posterior.layers import evaluating
from undrift.posterior.norm import MOVING
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.statistics import show


def move_statistics(model: Perturbed, batches: Batches) -> None:
    """Let moving norm statistics see the domain once, with noise as in a step; batch statistics need no pass."""
    if model.options.norm_statistics == "source":
        raise OptionError(
            'statistics_first with norm_statistics="source": statistics that stay the source\'s cannot be adapted. '
            'Perturb with norm_statistics="moving", or leave statistics_first out.'
        )
    if model.options.norm_statistics in MOVING:
        with evaluating(model):
            show(model, (images for _, images in batches()), noisy=model.options.train_samples > 0)
