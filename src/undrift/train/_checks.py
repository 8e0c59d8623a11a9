"""What must hold before a run begins; every error says what was found, what was needed and what to do."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from undrift import zoo
from undrift._errors import DataError, OptionError, OutputError
from undrift.data import Domain

from ._frames import Frames, cut, draw


def check_domain(domain: Domain, like: Domain | None) -> Domain:
    """Return the domain with its class names made up where it has none; raises if it cannot be learned from.

    Args:
        like: the training domain, for a validation domain, which must have the same classes.
    """
    if len(domain) == 0:
        raise DataError(f"{domain.name} has no images; needed: labelled images. Check the folder it was read from.")
    if domain.labels is None:
        raise DataError(
            f"{domain.name} has no labels; needed: one an image, as a source model is trained with labels. Read it "
            "with a loader that gives labels, such as undrift.data.pacs: a folder a class."
        )
    low, high = int(domain.labels.min()), int(domain.labels.max())
    count = high + 1 if like is None else len(like.class_names)
    names = domain.class_names or tuple(str(label) for label in range(count))
    if low < 0 or high >= len(names):
        raise DataError(
            f"{domain.name} has labels from {low} to {high} and {len(names)} class names; needed: labels from 0 to "
            f"{len(names) - 1}. Name every class, or correct the labels."
        )
    if like is not None and names != like.class_names:
        raise DataError(
            f"{domain.name} has {len(names)} classes ({_some(names)}), {like.name} has {len(like.class_names)} "
            f"({_some(like.class_names)}); needed: the same classes in the same order. Validate on images of the "
            "classes that are trained."
        )
    return replace(domain, class_names=names)


def check_network(network: nn.Module, name: str, training: Frames, domain: Domain) -> None:
    """Raise if the network cannot take the domain's images or does not give one logit a class."""
    channels = training.preprocess.channels
    if name in zoo.names():  # built for these classes, so there is nothing to try out
        if zoo.preprocess(name).channels != channels:
            raise DataError(
                f"{domain.name} gives images of {channels} channels, {name} takes {zoo.preprocess(name).channels}; "
                f"needed: the same. Read the domain with preprocess=undrift.zoo.preprocess({name!r}), or choose "
                "another network."
            )
        return
    mode = network.training
    views = next(draw(training, False, torch.Generator().manual_seed(0)).batches(1))
    with torch.no_grad():
        logits = network.eval()(training.preprocess.normalise(cut(training, views)))
    network.train(mode)
    if not isinstance(logits, torch.Tensor) or logits.shape != (1, len(domain.class_names)):
        found = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise OutputError(
            f"{name} returns {found} for one image; needed: logits of shape (1, {len(domain.class_names)}), one for "
            f"each class of {domain.name}. Build it with classes={len(domain.class_names)}."
        )


def pick_device(device: torch.device | str) -> torch.device:
    """Return the device that is meant; raises if it is a GPU that is not there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise OptionError(f"there is no device {device!r}; needed: auto, cpu or cuda. Use device='auto'.") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise OptionError(
            f"device {device} was asked for and PyTorch sees no GPU; needed: a GPU with its driver. Use device='cpu'."
        )
    return place


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
