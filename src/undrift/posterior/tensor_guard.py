"""Whether tensors are like others that were seen before, asked by one call into PyTorch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_guards: Any = getattr(getattr(torch._C._dynamo, "guards", None), "TensorGuards", None)


def likeness(*tensors: Tensor) -> Callable[..., bool] | None:
    """Return what tells whether tensors are like these; None where this PyTorch has none.

    It is what guards compiled code: of each tensor it compares class, sizes, strides, dtype, device, whether it wants a
    gradient here and now, and by which keys PyTorch dispatches it: what a transform has wrapped has others.
    """
    if _guards is None:
        return None
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    try:
        found: Callable[..., bool] = _guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    except (TypeError, ValueError, RuntimeError, SystemError):
        return None  # of some other PyTorch
    return found
