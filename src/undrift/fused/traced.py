"""The fused functions for a graph that is compiled for CUDA: operators that the compiler looks into.

It sees Triton's kernels, launches them itself, and fuses PyTorch's operators around them: the sum of squares with what
writes x, 2·x·grad with what reads the gradient. ε and its two sums are ours: given PyTorch's operators, the compiler
draws ε again in each kernel that reads the output (on an H200 a WRN-28-10 step of 26.9 ms, where Tent's takes 13.3).
"""

import torch
from torch import Tensor
from torch.library import triton_op, wrap_triton

from undrift.fused import gradients, plain, tiles
from undrift.fused.kernels import add_noise_kernel, finish_kernel, noise_gradients_kernel
from undrift.fused.kernels_grouped import grouped_add_noise_kernel, grouped_noise_gradients_kernel
from undrift.fused.launch import FINISH, Noises, first_of


def _plan(y: Tensor, first_row: int, groups: int, last: bool) -> Noises:
    return Noises(tiles.shape_of(y, last), groups, first_of(y, first_row, last), y.device.index or 0)


@triton_op("undrift::add_noise_traced", mutates_args=())
def add_noise(
    y: Tensor, plane: Tensor, log_var: Tensor, key: Tensor, first_row: int, groups: int, last: bool
) -> Tensor:
    """Return y + σ·√plane·ε in y's dtype and memory format."""
    y = tiles.dense(y, last)
    out = torch.empty_like(y)
    if out.numel() == 0:
        return out
    plan = _plan(y, first_row, groups, last)
    call, tensors = plan.add, (y, plane.contiguous(), log_var, key, out)
    if plan.finish is not None:
        wrap_triton(add_noise_kernel)[call.grid](*tensors, *call.numbers, **call.constants)
    else:
        wrap_triton(grouped_add_noise_kernel)[call.grid](*tensors, *call.numbers, **call.constants)
    return out


@triton_op("undrift::noise_gradients_traced", mutates_args=())
def noise_gradients(
    grad: Tensor, plane: Tensor, log_var: Tensor, key: Tensor, first_row: int, groups: int, last: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of plane and log_var for a gradient of `add_noise`'s output; ε is drawn again."""
    if grad.numel() == 0:
        return torch.zeros_like(plane), torch.zeros_like(log_var)
    grad, plane = tiles.dense(grad, last), plane.contiguous()
    plan = _plan(grad, first_row, groups, last)
    call = plan.sums
    grad_plane = torch.empty_like(plane)
    scratch = torch.empty(plan.partial, dtype=torch.float32, device=plane.device)
    tensors = (grad, plane, log_var, key)
    if plan.finish is None:
        wrap_triton(grouped_noise_gradients_kernel)[call.grid](
            *tensors, grad_plane, scratch, *call.numbers, **call.constants
        )
        return grad_plane, scratch.sum(0).to(log_var.dtype)
    grad_log_var = torch.empty_like(log_var)
    wrap_triton(noise_gradients_kernel)[call.grid](*tensors, scratch, *call.numbers, **call.constants)
    finish = plan.finish
    wrap_triton(finish_kernel)[finish.grid](scratch, plane, grad_plane, grad_log_var, *finish.numbers, **FINISH)
    return grad_plane, grad_log_var


gradients.of_add_noise(add_noise, noise_gradients)


# The energy ------------------------------------------------------------------------------------------------------


@triton_op("undrift::square_sum_traced", mutates_args=())
def square_sum(x: Tensor, groups: int, last: bool) -> Tensor:
    """Return Σ x² over each group's channels, in float32.

    In plain operators, which the compiler fuses with what makes x, and with a gradient from x as it is: left to
    autograd, the backward pass would want 2·x in float32, and the compiler keeps that beside x. An autograd.Function
    makes the same graph, but to trace one the compiler does what PyTorch warns of: under -W error that ends the run.
    """
    return plain.square_sum(x, groups, last)


gradients.of_square_sum(square_sum)
