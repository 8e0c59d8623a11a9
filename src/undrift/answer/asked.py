"""Check the number of draws and the views of a prediction."""

from collections.abc import Sequence

from torch import nn

from undrift._errors import OptionError
from undrift.answer.views import AUTO, ReversibleView, chosen, combined
from undrift.posterior.perturbed import Perturbed


def checked_samples(model: nn.Module, samples: int | None) -> int:
    """Return how many draws to average: those given, or the model's own; a plain network has none."""
    if samples is not None and (isinstance(samples, bool) or not isinstance(samples, int) or samples < 0):
        raise OptionError(
            f"samples={samples!r} is not a whole number from 0 up. 0 is the mean network, 10 the paper's."
        )
    if not isinstance(model, Perturbed):
        return 0
    return model.options.test_samples if samples is None else samples


def views_asked(model: nn.Module, names: str | Sequence[str] | None, own: bool = True) -> list[ReversibleView]:
    """Return the views of an image to ask, none where that is the image alone.

    Args:
        names: the views given; None takes the model's own where `own` allows it.
    """
    if names is None:
        names = model.options.answer_views if isinstance(model, Perturbed) and own else ()
        names = () if names == (AUTO,) else names
    names = chosen(names)
    return combined(names) if names else []
