"""Average the softmax of several draws into one answer."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import cycle

import torch
from torch import Tensor, nn

from undrift.answer.draws import draw
from undrift.answer.forward import blank_logits, finite_images, forward
from undrift.answer.prediction import Prediction, entropy_of
from undrift.answer.views import SAME, ReversibleView
from undrift.posterior.perturbed import Perturbed


@torch.no_grad()
def average(
    model: nn.Module,
    images: Tensor,
    samples: int,
    temperature: float = 1.0,
    fold_limit: int | None = None,
    views: Sequence[ReversibleView] = (),
) -> Prediction:
    """Return the prediction for one batch, in the mode the network is in; images that are not finite get no answer."""
    images, finite = finite_images(model, images)
    if len(images) == 0:
        return no_answer(model, images, finite)
    return average_finite(model, images, finite, samples, temperature, fold_limit, views)


@torch.no_grad()
def average_finite(
    model: nn.Module,
    images: Tensor,
    finite: Tensor | None,
    samples: int,
    temperature: float = 1.0,
    fold_limit: int | None = None,
    views: Sequence[ReversibleView] = (),
) -> Prediction:
    """Return what `average` does for finite images, without waiting for the device.

    Args:
        finite: for each image of the batch, whether it is among these; None where all are.
        views: of the images, to average over; none of them: the images alone. Draws look at the views in turn, and at
            each of them once at least.
    """
    views = views or [SAME]
    draws = max(samples, len(views))
    seen = [view(images) for view in views]
    looks = [seen[number % len(seen)] for number in range(draws)]
    with ExitStack() as stack:
        if isinstance(model, Perturbed):
            stack.enter_context(model.mean() if samples == 0 else model.rest())
        passes = draw(model, looks, fold_limit, partial(forward, model, given=images))
        if len(views) > 1:
            passes = _in_place(passes, cycle(views), len(images))
        softmaxes = ((logits if temperature == 1 else logits / temperature).softmax(dim=1) for logits in passes)
        if draws == 1:
            return Prediction.of(next(softmaxes), None, finite)  # its launches count where a network is small
        sums = [
            [part.unflatten(0, (-1, len(images))).sum(0) for part in (softmax, entropy_of(softmax))]
            for softmax in softmaxes
        ]
    probs, entropy = (sum(parts[1:], parts[0]) / draws for parts in zip(*sums, strict=True))
    return Prediction.of(probs, entropy, finite)


def _in_place(passes: Iterable[Tensor], views: Iterator[ReversibleView], images: int) -> Iterator[Tensor]:
    """Yield each pass with its maps turned back from the views to the images."""
    for logits in passes:
        yield logits if logits.ndim < 4 else torch.cat([next(views).answer(part) for part in logits.split(images)])


def no_answer(model: nn.Module, images: Tensor, finite: Tensor | None) -> Prediction:
    """Return the prediction for a batch without a finite image."""
    return Prediction.unknown(0 if finite is None else len(finite), blank_logits(model, images))
