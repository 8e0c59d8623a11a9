"""The memory orders that the implementations work in: contiguous, or channels last."""

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # what Triton's kernels take


def dense(tensor: Tensor, last: bool) -> Tensor:
    """Return the tensor, copied only where its memory is neither contiguous nor (for convolutions) channels last."""
    if tensor.is_contiguous() or (not last and _channels_last(tensor)):
        return tensor
    return tensor.contiguous()


def _channels_last(tensor: Tensor) -> bool:
    order = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.ndim)
    return order is not None and tensor.is_contiguous(memory_format=order)
