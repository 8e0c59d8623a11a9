"""A step's keys as an operator, for graphs that are being compiled.

A graph moves the step counter in place. What autograd's compiler can compute again in the backward pass, it does not
keep; from the counter, which has moved by then, it would compute the next step's keys. An operator that it knows
nothing of is by default not computed again: the keys themselves are kept.
"""

import torch
from torch import Tensor

from undrift._errors import UndriftError
from undrift.kernels import dispatch
from undrift.posterior.seeds import GOLDEN, keys_of


@torch.library.custom_op("undrift::keys", mutates_args=())
def keys(seed: Tensor, step: Tensor, count: int, uses: int) -> Tensor:
    """Return the first `count` keys of a step, a row of them for each time that a weight may be used."""
    if count and dispatch.quick(seed, step):
        from undrift.kernels.triton import launch

        first = launch.keys(seed, step, count)
    else:
        first = keys_of(seed, step, count)
    return first + (torch.arange(uses, device=step.device) * GOLDEN)[:, None]


@keys.register_fake
def _(_seed: Tensor, step: Tensor, count: int, uses: int) -> Tensor:
    told = torch._functorch.config
    if getattr(told, "aggressive_recomputation", False) or getattr(told, "activation_memory_budget", 1) < 1:
        raise UndriftError(
            "the compiler is told to compute more again in the backward pass (torch._functorch.config: "
            "aggressive_recomputation, or an activation_memory_budget below 1), and would draw other noise there; "
            "needed: neither. Set them to False and 1, or use torch.utils.checkpoint inside the network."
        )
    return step.new_empty((uses, count))
