"""Extract logits from what networks return: a tensor, a tuple, a dict, an object with `.logits`."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from undrift._errors import OutputError
from undrift.kernels.reference import wide

_NEEDED = "undrift needs a classifier's logits, batch × classes, one class an image"


def logits(output: Any) -> Tensor:
    """Return the logits, batch × classes, in float32 or better, from whatever a classifier returned.

    A tensor is used as it is, of an object or a dict its `logits`, of a tuple or list its first entry. Multi-label
    logits cannot be told from others: do not adapt such a network with these likelihoods, which all apply one softmax.

    Examples:
        >>> import torch
        >>> logits({"logits": torch.zeros(4, 10)}).shape
        torch.Size([4, 10])
    """
    found = output
    if isinstance(output, Mapping):
        found = output.get("logits")
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
            f"the network returned {_article(found)}; {_NEEDED}. Wrap the network so that it returns that tensor."
        )
    if not found.is_floating_point():
        raise OutputError(
            f"the network returned {found.dtype} values of shape {tuple(found.shape)}; {_NEEDED}, in floats. "
            "Return the scores before the arg max."
        )
    if found.ndim != 2 or found.shape[1] < 2:
        raise OutputError(
            f"the network returned a tensor of shape {tuple(found.shape)}{_what(found)}; {_NEEDED} (at least two). "
            + (_HINTS.get(found.ndim) or "Pool the map to one row per image, or adapt a classifier.")
        )
    return found.to(wide(found.dtype))


_HINTS = {
    1: "Give images with their batch dimension: images[None].",
    2: "Two classes need two logits: stack (0, z) for a sigmoid's z.",
}


def _what(found: Tensor) -> str:
    if found.ndim > 2:
        return " (a dense map)"
    return " (a regression or one sigmoid)" if found.ndim == 2 else ""


def _article(found: object) -> str:
    name = type(found).__name__
    return f"an {name}" if name[:1].lower() in "aeiou" else f"a {name}"
