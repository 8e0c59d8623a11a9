"""One image where a batch is needed: PyTorch's own words for it come from the middle of a network, or from no place."""

import torch
from torch import Tensor, nn

from undrift._errors import DataError, OutputError, UndriftError
from undrift.system.private import ConvNd

_SIDES = {1: "length", 2: "height × width", 3: "depth × height × width"}


def refuse_unbatched(net: nn.Module, images: Tensor, error: Exception | None = None) -> None:
    """Raise where a pass failed and its images have too few dimensions for the network's convolutions.

    Asked only then: a network may take other shapes and bring them into order itself.

    Args:
        error: what the pass raised, where it did.
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
