"""Explain why a network fails on images that do not fit it: no batch, other channels, another size or precision.

This runs only after a failure, because a network may reshape its input itself, and a successful pass must cost
nothing.
"""

import inspect
import traceback

import torch
from torch import Tensor, nn

from undrift._errors import DataError, OutputError, UndriftError
from undrift.posterior.attached import root_of
from undrift.posterior.select import plain_name
from undrift.system.private import ConvNd

_SIDES = {1: "length", 2: "height × width", 3: "depth × height × width"}


def refuse_unbatched(net: nn.Module, images: Tensor, error: Exception | None = None) -> None:
    """Raise if a pass failed and its images have too few dimensions for the network's convolutions.

    Args:
        error: what the pass raised, if it did.
    """
    missing = 0 if _is_clear(error) else _missing(net, images)
    if missing > 0:
        raise DataError(
            f"the network failed on a tensor of shape {tuple(images.shape)}; its convolutions need a batch, "
            f"N × channels × {_SIDES[_sides(net)]}. Stack images: torch.stack(images); or make a batch of one: "
            f"image[{', '.join(['None'] * missing)}]."
        ) from error


def refuse_unfitting(net: nn.Module, images: Tensor, error: Exception) -> None:
    """Raise if a pass failed at a layer that the images do not fit, and say what they lack."""
    if isinstance(error, TypeError):
        _refuse_other_inputs(root_of(net), error)
    if _is_clear(error) or _missing(net, images) > 0 or images.ndim < 3:
        return
    names = {module: plain_name(name) for name, module in net.named_modules()}
    # Not the frame that caught the error: its copy of the locals would hold the error, and the error that frame.
    own = [frame.f_locals for frame, _ in list(traceback.walk_tb(error.__traceback__))[1:]]
    reached = [(at["self"], at.get("input")) for at in own if isinstance(at.get("self"), nn.Module)]
    reached = [(module, given) for module, given in reached if module in names]
    if not reached:
        return
    failed, given = reached[-1]
    found = None
    if isinstance(failed, nn.Linear):
        if isinstance(given, Tensor) and given.ndim == 2 and given.shape[1] != failed.in_features:
            found = (
                f"images of shape {_shape(images)} reach the layer {names[failed]!r} as {given.shape[1]} numbers each; "
                f"it needs {failed.in_features}. Give them the size and the channels of the training images."
            )
    elif layer := next((module for module in failed.modules() if isinstance(module, ConvNd)), None):
        if layer is failed and isinstance(given, Tensor) and given.shape != images.shape:
            return  # other layers made what this one got
        if layer.in_channels != images.shape[1]:
            found = _channels(names[layer], layer.in_channels, images)
        elif layer is failed and layer.weight.dtype != images.dtype:
            found = (
                f"the images are {images.dtype}; the network, whose weights are of several precisions, needs "
                f"{layer.weight.dtype} at its layer {names[layer]!r}. Convert them: images.to({layer.weight.dtype})."
            )
    if found is not None:
        raise DataError(found) from error


def _refuse_other_inputs(net: nn.Module, error: Exception) -> None:
    """Raise if the network takes other inputs than one tensor."""
    signature = inspect.signature(net.forward)
    try:
        signature.bind("images")
    except TypeError:
        raise DataError(
            f"{type(net).__name__}.forward{signature} cannot be called with one tensor; needed: a network of images "
            "alone. Wrap it in a module whose forward takes the images and gives it the rest."
        ) from error


def _is_clear(error: Exception | None) -> bool:
    """Return whether an error says itself what is wrong."""
    ours = isinstance(error, UndriftError) and not isinstance(error, OutputError)
    return ours or isinstance(error, torch.OutOfMemoryError)


def _sides(net: nn.Module) -> int:
    return max((len(m.kernel_size) for m in net.modules() if isinstance(m, ConvNd)), default=0)


def _missing(net: nn.Module, images: Tensor) -> int:
    """Return how many dimensions the images lack for the network's convolutions."""
    sides = _sides(net)
    return sides + 2 - images.ndim if sides in _SIDES else 0


def _shape(images: Tensor) -> str:
    return " × ".join(map(str, images.shape[1:]))  # not of the batch, which may be repeated for several draws


def _channels(name: str, needed: int, images: Tensor) -> str:
    """Return what to do about images with other channels than a convolution takes."""
    found, sides = images.shape[1], images.ndim - 2
    if images.shape[-1] == needed:
        order = ", ".join(map(str, (0, sides + 1, *range(1, sides + 1))))
        return (
            f"the images are {_shape(images)}, their channels last; the layer {name!r} needs N × {needed} × "
            f"{_SIDES[sides]}. Move them: images.permute({order})."
        )
    do = "Load them as for training."
    if found == 1:
        do = f"Repeat the one channel: images.expand(-1, {needed}{', -1' * sides})."
    elif (found, needed) == (4, 3):
        do = "Leave the alpha channel out: images[:, :3]."
    plural = "" if found == 1 else "s"
    return f"the images are {_shape(images)}, {found} channel{plural}; the layer {name!r} needs {needed}. {do}"
