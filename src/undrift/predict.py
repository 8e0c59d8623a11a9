"""Draws of the perturbation, averaged into one prediction."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from undrift._adapted import keeping_noise
from undrift._batches import images_of, to_device
from undrift._errors import DataError, OptionError, OutputError
from undrift._outputs import logits as logits_of
from undrift.data import FileDomain, TensorDomain
from undrift.layers import evaluating
from undrift.perturb import Perturbed
from undrift.prediction import Prediction, entropy_of


@torch.no_grad()
def predict(
    model: nn.Module,
    images: Tensor | Iterable[Any],
    samples: int | None = None,
    *,
    generator: torch.Generator | int | None = None,
    temperature: float = 1.0,
    batch_size: int | None = None,
) -> Prediction:
    """Return what the network says: the mean over draws of its softmax, with entropy and mutual information.

        p = (1/S) Σ_s softmax(logits_s / T),   mutual_info = H(p) − (1/S) Σ_s H(p_s)

    All modules are in eval mode meanwhile, and moving norm statistics rest. One draw at a time is held.

    Args:
        model: a perturbed network, or any other, which gives one deterministic answer.
        images: a tensor, an `undrift.data` domain, or an iterable of batches (a loader; labels are not looked at).
        samples: draws to average; 0 is the mean network. Default: the option `test_samples`.
        generator: a generator or a seed makes the noise reproducible, and leaves the network's own noise where it was.
        temperature: T; see `undrift.temperature`.
        batch_size: how many images of a tensor to look at at once.

    Examples:
        >>> import undrift
        >>> model = undrift.perturb(nn.Sequential(nn.Flatten(), nn.Linear(12, 3)))
        >>> p = predict(model, torch.rand(5, 3, 2, 2), samples=4, generator=0)
        >>> p.probs.shape, bool((p.mutual_info >= 0).all())
        (torch.Size([5, 3]), True)
    """
    samples = _checked_samples(model, samples)
    if not 0 < temperature < float("inf"):
        raise OptionError(f"temperature={temperature!r} is not a number above 0. 1 leaves the logits as they are.")
    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        if isinstance(model, Perturbed) and (generator is not None or samples == 0):
            stack.enter_context(keeping_noise(model.key))
            if generator is not None:
                model.reseed(generator)
        return Prediction.cat(average(model, batch, samples, temperature) for batch in _batches(images, batch_size))


@torch.no_grad()
def average(model: nn.Module, images: Tensor, samples: int, temperature: float = 1.0) -> Prediction:
    """Return the prediction for one batch, in the mode the network is in, with the noise it comes to next."""
    images = to_device(images, model)
    sound = finite_rows(images)
    kept = images if bool(sound.all()) else images[sound]
    if len(kept) == 0:
        return Prediction.unknown(len(images), some_logits(model, images))
    with ExitStack() as stack:
        if isinstance(model, Perturbed):
            stack.enter_context(model.mean() if samples == 0 else model.rest())
        probs, entropy = _softmax(model, kept, temperature)
        for _ in range(1, samples):
            more_probs, more_entropy = _softmax(model, kept, temperature)
            probs += more_probs
            entropy += more_entropy
    draws = max(samples, 1)
    return Prediction.of(probs / draws, entropy / draws, sound)


def forward(model: nn.Module, images: Tensor) -> Tensor:
    """Return the network's logits, one row an image."""
    try:
        logits = logits_of(model(images))
    except BaseException:
        # An error or Ctrl-C inside a norm layer: its flags are given back now, before eval mode ends.
        for policy in model.norms if isinstance(model, Perturbed) else []:
            policy.settle()
        raise
    if len(logits) != len(images):
        raise OutputError(
            f"the network returned {len(logits)} rows of logits for {len(images)} images; one row an image is needed. "
            "Wrap the network so that it returns that."
        )
    names = model.classes if isinstance(model, Perturbed) else None
    if names is not None and len(names) != logits.shape[1]:
        raise OutputError(
            f"the model has {len(names)} class names, its network {logits.shape[1]} outputs; each output needs one. "
            "Give perturb(classes=…) the names in the order of the outputs."
        )
    return logits


def finite_rows(images: Tensor) -> Tensor:
    """Return for each image whether all its values are finite."""
    return torch.isfinite(images).flatten(1).all(dim=1)


@torch.no_grad()
def some_logits(model: nn.Module, images: Tensor) -> Tensor:
    """Return logits of blank images: they tell the number of classes when no image can be looked at."""
    blank = images.new_zeros(2, *images.shape[1:])
    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        if isinstance(model, Perturbed):
            stack.enter_context(keeping_noise(model.key))
            stack.enter_context(model.mean())
        return forward(model, blank)


def _softmax(model: nn.Module, images: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    probs = (forward(model, images) / temperature).softmax(dim=1)
    return probs, entropy_of(probs)


def _checked_samples(model: nn.Module, samples: int | None) -> int:
    if samples is not None and (isinstance(samples, bool) or not isinstance(samples, int) or samples < 0):
        raise OptionError(
            f"samples={samples!r} is not a whole number from 0 up. 0 is the mean network, 10 the paper's."
        )
    if not isinstance(model, Perturbed):
        return 0
    return model.options.test_samples if samples is None else samples


def _batches(images: Tensor | Iterable[Any], batch_size: int | None) -> Iterator[Tensor]:
    """Yield the batches behind what a caller means by images."""
    if batch_size is not None and batch_size < 1:
        raise OptionError(f"batch_size={batch_size!r} is below 1. Leave it out to look at all images at once.")
    if isinstance(images, FileDomain | TensorDomain):
        images, batch_size = images.named_batches(batch_size or 100), None
    if isinstance(images, Tensor | Mapping):
        whole = images_of(images)
        yield from whole.split(batch_size or max(len(whole), 1))
        return
    if batch_size is not None:
        raise OptionError("batch_size is for a tensor of images; a loader has its own. Leave it out.")
    if isinstance(images, str) or not isinstance(images, Iterable):
        raise DataError(
            f"images is a {type(images).__name__}; a tensor or an iterable of batches is needed. "
            "For a folder use undrift.data.images."
        )
    for item in images:
        yield images_of(item)
