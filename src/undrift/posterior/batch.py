"""Extract images from what loaders yield: a tensor, a tuple, a dict. Labels are never read."""

from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from undrift._errors import DataError
from undrift.posterior.perturbed import Perturbed

KEYS = ("pixel_values", "image", "images", "x", "input", "inputs", "img", "data")


def as_tensor(given: Any) -> Any:
    """Return a NumPy array as a tensor, without a copy where it can be had; anything else unchanged."""
    if not isinstance(given, np.ndarray):
        return given
    # Neither a mirrored array (BGR made RGB) nor one that must not be written can be shared with a tensor.
    shared = np.ascontiguousarray(given)
    return torch.from_numpy(shared if shared.flags.writeable else shared.copy())


def images_of(item: Any) -> Tensor:
    """Return the images, batch first, from what a loader yields; nothing else in it is read.

    Examples:
        >>> images_of((torch.zeros(4, 3, 8, 8), "labels are not looked at")).shape
        torch.Size([4, 3, 8, 8])
    """
    item = as_tensor(item)
    if isinstance(item, Mapping):
        key = next((k for k in KEYS if k in item), None)
        if key is None:
            raise DataError(
                f"the loader yields dicts with {', '.join(map(repr, item)) or 'no entries'}; images are looked for "
                f"under {', '.join(KEYS)}. Rename the entry, or yield the images alone."
            )
        return images_of(item[key])
    if isinstance(item, tuple | list) and item:
        # A collated batch has one tensor of images; taking the first of many separate ones would lose the others.
        if len(item) > 1 and all(isinstance(x, Tensor | np.ndarray) and x.ndim == 3 for x in item):
            raise DataError(
                f"the loader yields {type(item).__name__}s of {len(item)} separate images, the first of shape "
                f"{tuple(item[0].shape)}; a batch is one tensor. Collate them: torch.stack(images)."
            )
        return images_of(item[0])
    if not isinstance(item, Tensor):
        raise DataError(
            f"the loader yields {type(item).__name__} objects; a batch is a tensor, a tuple that starts with one, or a "
            "dict with one. Convert it in the dataset or the collate function; files are read by undrift.images.domain."
        )
    if item.ndim < 2:
        raise DataError(
            f"the loader yields a {item.dtype} tensor of shape {tuple(item.shape)} where images should be; a batch of "
            "images is a tensor with the batch first. Give images first and labels behind them; a single batch in a "
            "list: [(images, labels)]."
        )
    if not item.is_floating_point():
        raise DataError(
            f"the loader yields a {item.dtype} tensor of shape {tuple(item.shape)}; a batch of images is a tensor of "
            "floats with the batch first, normalised as in training. Convert it in the dataset: image.float() / 255."
        )
    return item


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the network's first parameter or buffer."""
    return next((t.device for t in chain(model.parameters(), model.buffers())), torch.device("cpu"))


def to_device(images: Tensor, model: nn.Module) -> Tensor:
    """Return the images where the network is, and in the precision of its weights."""
    return images.to(device_of(model), _precision(model, images), non_blocking=True)


def _precision(model: nn.Module, images: Tensor) -> torch.dtype:
    """Return the precision for the images: that of all weights, their own where weights are of several.

    Vectors are not asked, norm layers often stay in float32; nor is the noise, which always does. Autocast converts
    images itself, but none of float64.
    """
    net = model.net if isinstance(model, Perturbed) else model
    weights = (p.dtype for p in net.parameters() if p.ndim > 1 and p.is_floating_point())
    first = next(weights, images.dtype)
    if first == images.dtype or not images.is_floating_point():  # no more weights to ask
        return images.dtype
    if images.dtype is not torch.float64 and torch.is_autocast_enabled(device_of(model).type):
        return images.dtype
    return first if all(other == first for other in weights) else images.dtype
