"""A step's keys as an operator, for graphs that are being compiled.

A graph moves the step counter in place. What autograd's compiler can compute again in the backward pass, it does not
keep; from the counter, which has moved by then, it would compute the next step's keys. An operator that it knows
nothing of is not computed again: the keys themselves are kept.
"""

import torch
from torch import Tensor

from undrift.key import keys_of


@torch.library.custom_op("undrift::keys", mutates_args=())
def keys(seed: Tensor, step: Tensor, count: int) -> Tensor:
    """Return the first `count` keys of a step."""
    return keys_of(seed, step, count)


@keys.register_fake
def _(_seed: Tensor, step: Tensor, count: int) -> Tensor:
    return step.new_empty((count,))
