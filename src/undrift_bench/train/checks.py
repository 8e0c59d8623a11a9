"""Check everything before a training run begins."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from undrift._errors import DataError, OutputError
from undrift.images import Domain, TensorDomain
from undrift_bench import zoo
from undrift_bench.train.frames import Frames, cut, draw


def check_domain(domain: Domain, like: Domain | None) -> Domain:
    """Return the domain with its class names made up where it has none; raises if it cannot be learned from.

    Args:
        like: the training domain, for a validation domain, which must have the same classes.
    """
    _check_text(domain)
    if len(domain) == 0:
        raise DataError(f"{domain.name} has no images; needed: labelled images. Check the folder it was read from.")
    if isinstance(domain, TensorDomain):
        _check_images(domain)
    labels = _checked_labels(domain)
    low, high = int(labels.min()), int(labels.max())
    count = high + 1 if like is None else len(like.class_names)
    names = domain.class_names or tuple(str(label) for label in range(count))
    if low < 0 or high >= len(names):
        raise DataError(
            f"{domain.name} has labels from {low} to {high} and {len(names)} class names; needed: labels from 0 to "
            f"{len(names) - 1}. Name every class, or correct the labels."
        )
    if len(names) < 2:
        raise DataError(
            f"{domain.name} has one class ({_some(names)}); needed: two or more, as there is nothing to tell apart in "
            "one. Add a folder for each class, or check that the path is the folder above them."
        )
    if like is not None and names != like.class_names:
        raise DataError(
            f"{domain.name} has {len(names)} classes ({_some(names)}), {like.name} has {len(like.class_names)} "
            f"({_some(like.class_names)}); needed: the same classes in the same order. Validate on images of the "
            "classes that are trained."
        )
    if like is not None and (lines := like.preprocess.differences(domain.preprocess)):
        raise DataError(
            f"{domain.name} has another preprocessing than {like.name}, which is trained on ({'; '.join(lines)}); "
            "needed: the same, as the best epoch is chosen by what the network will see. Read it with that one, or "
            "pass validation.prepared(domain.preprocess)."
        )
    return replace(domain, class_names=names, labels=labels.long())


def check_network(network: nn.Module, name: str, training: Frames, domain: Domain) -> None:
    """Raise if the network cannot take the domain's images or does not give one logit a class."""
    channels = training.preprocess.channels
    if name in zoo.names():  # built for these classes, so there is nothing to try out
        if zoo.preprocess(name).channels != channels:
            raise DataError(
                f"{domain.name} gives images of {channels} channels, {name} takes {zoo.preprocess(name).channels}; "
                f"needed: the same. Read the domain with preprocess=undrift_bench.zoo.preprocess({name!r}), or choose "
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


def _check_text(domain: Domain) -> None:
    """Raise if the file at the end could not hold the names: a folder's may be bytes that are no UTF-8."""
    for name in (domain.name, *domain.class_names):
        if name.encode(errors="ignore").decode() != name:
            raise DataError(
                f"the folder {name!a} has a name that is not UTF-8; needed: one that is, as the source model's file "
                "says the names of domain and classes. Rename the folder."
            )


def _check_images(domain: TensorDomain) -> None:
    """Raise unless the images are what views are cut from; a float tensor could be in [0, 1] or in [0, 255]."""
    images, channels = domain.images, domain.preprocess.channels
    if images.dtype != torch.uint8 or images.dim() != 4:
        raise DataError(
            f"{domain.name} has {images.dtype} images of shape {tuple(images.shape)}; needed: uint8, N×C×H×W. Convert "
            "them, from [0, 1] with (255 * images).round().to(torch.uint8)."
        )
    if images.shape[1] != channels:
        raise DataError(
            f"{domain.name} has images of {images.shape[1]} channels and a preprocessing for {channels}; needed: the "
            "same. Choose a network for such images, or convert them."
        )


def _checked_labels(domain: Domain) -> Tensor:
    labels, need = domain.labels, "needed: one whole number per image"
    if labels is None:
        raise DataError(
            f"{domain.name} has no labels; {need}, as a source model is trained with labels. Read it with a loader "
            "that gives labels, such as undrift_bench.data.pacs: a folder a class."
        )
    whole = not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)
    if labels.shape != (len(domain),) or not whole:
        raise DataError(
            f"{domain.name} has {len(domain)} images and {labels.dtype} labels of shape {tuple(labels.shape)}; {need}. "
            "Give the labels that belong to these images, as labels.long()."
        )
    return labels


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
