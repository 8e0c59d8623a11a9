# ruff: noqa: ARG001 (a fake implementation takes all that the real one takes)
"""The functions as operators of torch.library: one node for torch.compile, export, FakeTensor and autocast.

As in uncompiled code, they run Triton's kernels on CUDA, small pieces on a CPU, and PyTorch's own operators elsewhere.
Their backward passes are operators too, and draw ε again. There is no second derivative; autograd raises an error.
"""

import torch
from torch import Tensor

from undrift._errors import UndriftError
from undrift.kernels import choice, cpu, operator_gradients, reference
from undrift.kernels.epsilon import GOLDEN, keys_of
from undrift.kernels.layout import FLOATS
from undrift.system.private import recomputes_more


def _launches(tensor: Tensor, dtypes: tuple[torch.dtype, ...] = FLOATS) -> bool:
    """Return whether Triton's kernels can serve this tensor; warn once if they should and cannot."""
    return tensor.is_cuda and choice.on_cuda(tensor, dtypes) == "triton"


@torch.library.custom_op("undrift::square_sum", mutates_args=())
def square_sum(x: Tensor, groups: int, last: bool) -> Tensor:
    """Return Σ x² over each group's channels, in float32 or better: batch × groups × positions (linear: …, 1)."""
    if _launches(x):
        from undrift.kernels.triton import launch

        return launch.square_sum(x, groups, last)
    return reference.square_sum(x, groups, last)


@square_sum.register_fake
def _(x: Tensor, groups: int, last: bool) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty((*x.shape[:-1], 1) if last else (x.shape[0], groups, *x.shape[2:]), dtype=dtype)


operator_gradients.of_square_sum(square_sum)


@torch.library.custom_op("undrift::add_noise", mutates_args=())
def add_noise(
    y: Tensor, plane: Tensor, log_var: Tensor, key: Tensor, first_row: int, groups: int, last: bool
) -> Tensor:
    """Return y + σ·√plane·ε, with σ² = exp(log_var) of each channel and √plane of its group, in y's dtype."""
    if _launches(y):
        from undrift.kernels.triton import launch

        return launch.add_noise(y, plane, log_var, key, first_row, groups, last)
    if choice.in_pieces(y, plane, log_var):
        out, _ = cpu.noisy(y, plane, log_var, key, first_row, groups, last)
    else:
        out = reference.add_noise(y, plane, log_var, key, first_row, groups, last)
    # In y's memory format, as promised to the compiler.
    return out if out.stride() == y.stride() else torch.empty_like(y).copy_(out)


@add_noise.register_fake
def _(y: Tensor, plane: Tensor, log_var: Tensor, key: Tensor, first_row: int, groups: int, last: bool) -> Tensor:
    return torch.empty_like(y)


@torch.library.custom_op("undrift::noise_gradients", mutates_args=())
def noise_gradients(
    grad: Tensor, plane: Tensor, log_var: Tensor, key: Tensor, first_row: int, groups: int, last: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of plane and log_var for a gradient of `add_noise`'s output; ε is drawn again."""
    if _launches(grad):
        from undrift.kernels.triton import launch

        return launch.noise_gradients(grad, plane, log_var, key, first_row, groups, last)
    if choice.in_pieces(grad, plane, log_var):
        kept = cpu.noise(grad, plane, key, first_row, groups, last)
        grad_plane, grad_log_var = cpu.noise_gradients(grad, kept, plane, log_var, groups, last)
    else:
        grad_plane, grad_log_var = reference.noise_gradients(grad, plane, log_var, key, first_row, groups, last)
    return grad_plane.contiguous(), grad_log_var


@noise_gradients.register_fake
def _(
    grad: Tensor, plane: Tensor, log_var: Tensor, key: Tensor, first_row: int, groups: int, last: bool
) -> tuple[Tensor, Tensor]:
    return plane.new_empty(plane.shape), torch.empty_like(log_var)


operator_gradients.of_add_noise(add_noise, noise_gradients)


@torch.library.custom_op("undrift::keys", mutates_args=())
def keys(seed: Tensor, step: Tensor, count: int, uses: int) -> Tensor:
    """Return the first `count` keys of a step, a row of them for each time that a weight may be used.

    A graph moves the step counter in place. What autograd's compiler can compute again in the backward pass, it does
    not keep; from the counter, which has moved by then, it would compute the next step's keys. An operator that it
    knows nothing of is by default not computed again: the keys themselves are kept.
    """
    if count and _launches(step, (torch.int64,)):
        from undrift.kernels.triton import launch

        first = launch.keys(seed, step, count)
    else:
        first = keys_of(seed, step, count)
    return first + (torch.arange(uses, device=step.device) * GOLDEN)[:, None]


@keys.register_fake
def _(seed: Tensor, step: Tensor, count: int, uses: int) -> Tensor:
    if recomputes_more():
        raise UndriftError(
            "the compiler is told to compute more again in the backward pass (torch._functorch.config: "
            "aggressive_recomputation, or an activation_memory_budget below 1), and would draw other noise there; "
            "needed: neither. Set them to False and 1, or use torch.utils.checkpoint inside the network."
        )
    return step.new_empty((uses, count))
