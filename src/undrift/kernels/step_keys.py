"""Make the keys of a step: one launch on a GPU, the arithmetic of `kernels.keys` elsewhere."""

import torch
from torch import Tensor

from undrift.kernels.choice import choose, on_kernels
from undrift.kernels.keys import keys_of


def keys(seed: Tensor, step: Tensor, count: int) -> Tensor:
    """Return the first keys of a step."""
    if not count or not on_kernels(step) or choose(step, seed, dtypes=(torch.int64,)) != "triton":
        return keys_of(seed, step, count)
    from undrift.kernels.triton import launch

    return launch.keys(seed, step, count)  # one launch for sixteen
