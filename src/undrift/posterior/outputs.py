"""Extract logits from what networks return: a tensor, a tuple, a dict, an object with `.logits`.

Classes are always dimension 1, and every position behind it has a softmax of its own:

    batch × classes                            one class per image
    batch × classes × height × width           one class per pixel (volumes have one more dimension)
    batch × 2 × labels                         any number of labels per image: no and yes of each

One logit z where there could be many, a sigmoid's, tells two classes apart: it becomes the two (0, z).
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from undrift._errors import OutputError
from undrift.kernels.reference import wide
from undrift.options import Outputs
from undrift.system.validate import a_type

_NEEDED = "undrift needs logits, batch × classes, or batch × classes × height × width for a class per pixel"
POSITIONS = 64  # pixels or labels of an image that `some_positions` gives at most
_NAMES = ("logits", "out")  # Hugging Face's and torchvision's


def logits(output: Any, kind: Outputs = "softmax") -> Tensor:
    """Return the logits, batch × classes (× height × width), in float32 or better, from whatever a network returned.

    A tensor is used as it is, of an object or a dict its `logits` (or "out"), of a tuple or list its first entry.
    One logit z per image or pixel is a sigmoid's: it becomes the two (0, z), whose softmax is sigmoid(z).

    Args:
        kind: "softmax" for one class per image or pixel; "sigmoid" for any number of labels per image, one logit
            each, which becomes two in the same way.

    Examples:
        >>> logits({"logits": torch.zeros(4, 10)}).shape, logits({"out": torch.zeros(4, 21, 8, 8)}).shape
        (torch.Size([4, 10]), torch.Size([4, 21, 8, 8]))
        >>> logits(torch.zeros(4, 10), "sigmoid").shape
        torch.Size([4, 2, 10])
        >>> logits(torch.tensor([[1.5], [-0.5]])).tolist()
        [[0.0, 1.5], [0.0, -0.5]]
    """
    found = output
    if isinstance(output, Mapping):
        found = next((output[name] for name in _NAMES if output.get(name) is not None), None)
        if found is None:
            raise OutputError(
                f"the network returned a dict with {', '.join(map(repr, output)) or 'no entries'}; {_NEEDED}, under "
                '"logits". Wrap the network so that it returns them.'
            )
    elif not isinstance(output, Tensor):
        named = getattr(output, "logits", None)
        found = named if named is not None else output[0] if isinstance(output, tuple | list) and output else output
    if not isinstance(found, Tensor):
        raise OutputError(
            f"the network returned {a_type(found)}; {_NEEDED}. Wrap the network so that it returns that tensor."
        )
    if not found.is_floating_point():
        raise OutputError(
            f"the network returned {found.dtype} values of shape {tuple(found.shape)}; {_NEEDED}, in floats. "
            "Return the scores before the arg max."
        )
    if found.ndim < 2:
        found = found.reshape(-1, 1)  # squeezed, as for binary_cross_entropy_with_logits
    if kind == "sigmoid":
        return _no_and_yes(found).to(wide(found.dtype))
    if found.ndim not in (2, 4, 5) or found.shape[1] == 0 or (found.ndim > 2 and found[0, 0].numel() == 1):
        do = "Flatten the map of one pixel: logits.flatten(1)."
        if found.ndim == 3:
            do = "Pool tokens to one row per image, or return batch × classes × height × width."
        raise OutputError(f"the network returned a tensor of shape {tuple(found.shape)}; {_NEEDED}. {do}")
    if found.shape[1] == 1:
        found = torch.cat([torch.zeros_like(found), found], dim=1)
    return found.to(wide(found.dtype))


def at_size_of(images: Tensor, found: Tensor) -> Tensor:
    """Return the logits of pixels at the images' size; a network may return a smaller map, as SegFormer does."""
    if found.ndim not in (4, 5) or images.ndim != found.ndim or images.shape[2:] == found.shape[2:]:
        return found
    mode = "bilinear" if found.ndim == 4 else "trilinear"
    return F.interpolate(found, images.shape[2:], mode=mode, align_corners=False)


def rows(found: Tensor) -> Tensor:
    """Return one row of classes per image, per pixel or per label, for losses over a batch of softmaxes.

    Examples:
        >>> rows(torch.zeros(4, 21, 8, 8)).shape
        torch.Size([256, 21])
    """
    return found if found.ndim == 2 else found.movedim(1, -1).flatten(0, -2)


def spread(values: Tensor, most: int, first: int = 2) -> Tensor:
    """Return at most so many positions of each image, evenly spread along every side, in one dimension.

    Args:
        first: where the sides begin: 2 with classes in front of them, 1 without.

    Examples:
        >>> spread(torch.arange(16).view(1, 4, 4), most=4, first=1)
        tensor([[ 0,  2,  8, 10]])
    """
    sides = values.shape[first:]
    step = max(1, int((math.prod(sides) / most) ** (1 / len(sides))))
    while math.prod(-(-side // step) for side in sides) > most:
        step += 1
    # In every dimension: a step along the flattened map may be a multiple of the width, and see one column.
    places: tuple[Any, ...] = (..., *(slice((min(step, side) - 1) // 2, None, step) for side in sides))
    return values[places].flatten(first)


def some_positions(found: Tensor) -> Tensor:
    """Return the logits of each image's pixels or labels, or of some of them, evenly spread."""
    return found if found.ndim == 2 else spread(found, POSITIONS)


def by_position(found: Tensor) -> Tensor:
    """Return one row of classes per image, or for each of `some_positions`."""
    return rows(some_positions(found))


def per_image(found: Tensor, asking: str) -> Tensor:
    """Return the logits where they are one row per image; raise with what asks for that where they are not."""
    if found.ndim == 2:
        return found
    raise OutputError(
        f"the network answers each {'label' if found.ndim == 3 else 'pixel'} (logits of shape {tuple(found.shape)}), "
        f"and {asking} needs one class per image. Leave it out."
    )


def _no_and_yes(found: Tensor) -> Tensor:
    if found.ndim != 2:
        raise OutputError(
            f"the network returned a tensor of shape {tuple(found.shape)}; with sigmoid outputs undrift needs batch × "
            'labels, one logit each. Return that, or leave outputs="sigmoid" out.'
        )
    return torch.stack([torch.zeros_like(found), found], dim=1)
