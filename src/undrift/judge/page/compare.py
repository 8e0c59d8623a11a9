"""Compare the answers of a network and of its source on the same images, for a page."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from undrift._errors import DataError
from undrift.answer.average import average
from undrift.answer.forward import batches_of
from undrift.answer.predict_session import PredictSession, views_asked
from undrift.answer.prediction import Prediction
from undrift.images import FileDomain, TensorDomain
from undrift.judge.metrics import Tally
from undrift.judge.page.recording import Recording
from undrift.posterior.batch import to_device
from undrift.posterior.model_lock import turn
from undrift.posterior.perturbed import Perturbed

BATCH = 100


def source_answer(model: Perturbed, images: Tensor) -> Prediction:
    """Return the source network's answer to a batch; the model is left as it was."""
    with turn(model), model.off() as net:
        (found,) = PredictSession(net, None, 0).each([images], images, partial(average, net, samples=0))
    return found


def adapted_answer(model: Perturbed, images: Tensor) -> Prediction:
    """Return the answer of `undrift.predict` to a batch, with noise of its own."""
    views = views_asked(model, None, own=True)
    ask = partial(average, model, samples=model.options.test_samples, views=views)
    (found,) = PredictSession(model, 0, model.options.test_samples).each([images], images, ask)
    return found


@torch.no_grad()
def compare(
    model: Perturbed, images: Any, labels: Tensor | None, most: int
) -> tuple[Recording, tuple[Tally, Tally] | None]:
    """Return what a page shows of both networks' answers to some images; with labels, their scores as well.

    Args:
        most: at most so many images, spread evenly where they can be chosen.
    """
    seen, tallies = Recording(model.preprocess, model.classes), (Tally(), Tally())
    for batch, truth, names in _batches(images, labels, most):
        batch = to_device(batch, model)
        source, adapted = source_answer(model, batch).cpu(), adapted_answer(model, batch).cpu()
        seen.add(batch, adapted, truth, names)
        seen.compare(source, adapted)
        if truth is not None:
            for tally, found in zip(tallies, (source, adapted), strict=True):
                tally.add(found.probs, truth, found.label)
    return seen, tallies if labels is not None else None


def _batches(images: Any, labels: Tensor | None, most: int) -> Iterator[tuple[Tensor, Tensor | None, list[str] | None]]:
    """Yield batches of images with their labels and names."""
    if isinstance(images, FileDomain | TensorDomain):
        places = _evenly(len(images), most)
        chosen = images.select(places)
        named = {images.name_of(i) if isinstance(images, TensorDomain) else images.sources[i].name: i for i in places}
        for batch, names in chosen.named_batches(BATCH):
            truth = None if labels is None else labels[[named[name] for name in names]].cpu().long()
            yield batch, truth, list(names)
        return
    if isinstance(images, Tensor):
        if labels is not None and len(labels) != len(images):
            raise DataError(
                f"there are {len(labels)} labels for {len(images)} images; needed: one per image, in their order. Give "
                "as many labels as images."
            )
        places = _evenly(len(images), most)
        images, labels = images[places], None if labels is None else labels[places]
    done = 0
    for batch in batches_of(images, BATCH):
        if done >= most:
            return
        batch = batch[: most - done]
        truth = None if labels is None else labels[done : done + len(batch)].cpu().long()
        if truth is not None and len(truth) < len(batch):
            raise DataError(
                f"there are {len(labels) if labels is not None else 0} labels for more images; needed: one per image, "
                "in their order. Give as many labels as images."
            )
        yield batch, truth, None
        done += len(batch)


def _evenly(count: int, most: int) -> list[int]:
    """Return places spread evenly over `count`, at most `most`.

    Examples:
        >>> _evenly(10, 4), _evenly(3, 5)
        ([0, 2, 5, 7], [0, 1, 2])
    """
    return [i * count // most for i in range(most)] if count > most else list(range(count))
