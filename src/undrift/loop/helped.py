"""Estimate on a bounded sample of images whether adaptation helped, from the answers of source and adapted network."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor

from undrift.answer.forward import forward
from undrift.answer.views import AUTO, VIEWS, ReversibleView, SafeViews, combined
from undrift.judge.accuracy import Helping, helping
from undrift.loop.indexed_loader import avoid_last_single
from undrift.posterior.batch import to_device
from undrift.posterior.layers import evaluating
from undrift.posterior.outputs import by_position
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.seeds import Key
from undrift.posterior.state import extra_pass, keeping_noise, noisy_statistics, one_pass

MOST, LEAST = 500, 128
"""Images in the sample: 500 give a standard error of two points."""

SHARE = 8
"""One of so many images learned from is in the sample; eight passes at most, a third of training's cost."""

VALUES = 2**26
"""Values that a sample holds at most: 256 MB of float32, 445 images of 224 × 224."""

Ask = Callable[[Tensor], Tensor]


class Sample:
    """A sample of a domain's images, evenly spaced, because images of one class often come together.

    Args:
        size: images of the domain.
        learned: images that are learned from, each as often as there are epochs.
        key: knows how a batch lies on several processes; each keeps the whole sample.
    """

    def __init__(self, size: int, learned: int, key: Key) -> None:
        self.size, self.largest, self._key = size, 1, key
        self.most = max(LEAST, min(MOST, learned // SHARE))
        self._parts: list[Tensor] = []

    def of(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Pass batches on, and keep the sample of them.

        That of the last pass stays: a run that resumes sees augmented images as they were there, not as in the first.
        """
        self._parts = []
        for places, images in batches:
            most = max(1, min(self.most, VALUES // max(1, images[0].numel()))) if len(images) else self.most
            self.largest = max(self.largest, len(places))
            kept = places * most % self.size < most if most < self.size else places >= 0
            share = self._key.share
            picked = images[kept.to(images.device)] if share is None else share.picked(images, kept)
            self._parts.append(picked.cpu())
            yield places, images

    def batches(self) -> list[Tensor]:
        """Return the images in batches as large as the domain's, mixed; those of several sizes in their own batches."""
        parts = [part for part in self._parts if len(part)]
        if len({part.shape[1:] for part in parts}) != 1:
            return parts
        images = torch.cat(parts)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        return list(images[order].split(avoid_last_single(self.largest, len(images))))


def compare(
    model: Perturbed, batches: Sequence[Tensor], names: Sequence[str] | None = None, given: Tensor | None = None
) -> Helping:
    """Return whether the adapted network is right more often than its source, estimated on these images.

    Args:
        batches: images, all finite.
        names: views under which no label changes; None tests which are safe for the adapted network.
        given: what a stream answered when it met these images, as log-probabilities; None asks the network now.
    """
    in_a_stream = given is not None
    names, adapted = adapted_answers(model, batches, names, in_a_stream)
    if given is not None:
        adapted[0] = given
    source = source_answers(model, batches, names, in_a_stream)
    return helping(source, adapted, len(adapted[0]) // sum(map(len, batches)))


@torch.no_grad()
def adapted_answers(
    model: Perturbed, batches: Sequence[Tensor], names: Sequence[str] | None = None, in_a_stream: bool = False
) -> tuple[tuple[str, ...], Tensor]:
    """Return the names of safe views, and the adapted network's logits (views × images × classes, on the CPU).

    The first are those of the images themselves; where `predict` averages over views, log-probabilities of that.

    Args:
        in_a_stream: let norm layers do what they do in a stream's steps: a moving average may be far behind the batch.
            Processes that adapt together divide each batch; a stream is one process's own.
    """
    test = None
    if any(images.ndim != 4 or min(images.shape[-2:]) < 2 for images in batches):
        names = ()
    elif names is None or tuple(names) == (AUTO,):
        names, test = tuple(VIEWS), SafeViews(tuple(VIEWS))

    def ask(images: Tensor) -> Tensor:
        model.key.step.zero_()  # the same noise every time
        return forward(model, images)

    with evaluating(model), _as_in_a_stream(model) if in_a_stream else one_pass(model):
        logits = _all(model, ask, batches, combined(names), in_a_stream)
    safe = tuple(names)
    if test is not None:
        images = sum(map(len, batches))
        for place, name in enumerate(names):
            test.look(_of_images(logits[0], images), name, _of_images(logits[2**place], images))
        safe = test.passed or ()
        unsafe = sum(2**place for place, name in enumerate(names) if name not in safe)
        logits = logits[[at for at in range(len(logits)) if not at & unsafe]]
    if len(logits) > 1 and model.options.answer_views and not in_a_stream:
        logits[0] = logits.log_softmax(-1).logsumexp(0) - math.log(len(logits))
    return safe, logits


@torch.no_grad()
def source_answers(
    model: Perturbed, batches: Sequence[Tensor], names: Sequence[str], in_a_stream: bool = False
) -> Tensor:
    """Return the source network's logits, views × images × classes, on the CPU."""
    with model.off() as net, evaluating(net):
        return _all(model, partial(forward, model), batches, combined(names), in_a_stream)


@contextmanager
def _as_in_a_stream(model: Perturbed) -> Iterator[Perturbed]:
    # A stream answers with the mean network. Noise would cost it answers that were right, as no draws are averaged
    # here; only averages that noisy steps moved fit it no other way, and "train" uses the batch instead.
    kept = model.options.norm_statistics != "train"
    with keeping_noise(model.key), extra_pass(model, noisy=kept and noisy_statistics(model)):
        yield model


def _of_images(found: Tensor, images: int) -> Tensor:
    """Return rows of positions as images × classes × positions; rows of images as they are."""
    return found if len(found) == images else found.unflatten(0, (images, -1)).movedim(-1, 1)


def _all(
    model: Perturbed, ask: Ask, batches: Sequence[Tensor], views: Sequence[ReversibleView], in_a_stream: bool
) -> Tensor:
    """Return the logits of every image's views, on the CPU, as not every device has float64."""
    found = []
    for images in batches:
        with nullcontext(images) if in_a_stream else model.key.dividing(images) as mine:
            here = to_device(mine, model)
            answers = [by_position(view.answer(ask(view(here)))) for view in views]
        found.append(torch.stack(answers).float().cpu())
    return torch.cat(found, 1)
