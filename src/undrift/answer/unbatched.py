"""Explain the error of a network that got one image instead of a batch."""

import torch
from torch import Tensor, nn

from undrift._errors import DataError, OutputError, UndriftError
from undrift.system.private import ConvNd

_SIDES = {1: "length", 2: "height × width", 3: "depth × height × width"}


def refuse_unbatched(net: nn.Module, images: Tensor, error: Exception | None = None) -> None:
    """Raise if a pass failed and its images have too few dimensions for the network's convolutions.

    Only after a failure: a network may accept other shapes and reshape them itself.

    Args:
        error: what the pass raised, if it did.
    """
    if isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, UndriftError) and not isinstance(error, OutputError)
    ):
        return
    sides = max((len(m.kernel_size) for m in net.modules() if isinstance(m, ConvNd)), default=0)
    missing = sides + 2 - images.ndim
    if sides not in _SIDES or missing < 1:
        return
    raise DataError(
        f"the network failed on a tensor of shape {tuple(images.shape)}; its convolutions need a batch, "
        f"N × channels × {_SIDES[sides]}. Make one of a single image: image[{', '.join(['None'] * missing)}]."
    ) from error
