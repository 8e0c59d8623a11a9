"""The memory orders that the implementations work in: contiguous, or channels last."""

import torch
from torch import Tensor

Seen = tuple[torch.Size, bool]  # the size of a tensor, and whether it is contiguous
FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # what Triton's kernels take


def dense(tensor: Tensor, last: bool) -> Tensor:
    """Return the tensor, copied only where its memory is neither contiguous nor (for convolutions) channels last."""
    if tensor.is_contiguous() or (not last and _channels_last(tensor)):
        return tensor
    return tensor.contiguous()


def dense_and_seen(tensor: Tensor, last: bool) -> tuple[Tensor, Seen]:
    """Return a `dense` tensor, and what of it decides how kernels are launched."""
    contiguous = tensor.is_contiguous()
    if not contiguous and (last or not _channels_last(tensor)):
        tensor, contiguous = tensor.contiguous(), True
    return tensor, (tensor.shape, contiguous)


_ORDERS = {4: torch.channels_last, 5: torch.channels_last_3d}


def _channels_last(tensor: Tensor) -> bool:
    order = _ORDERS.get(tensor.ndim)
    return order is not None and tensor.is_contiguous(memory_format=order)
