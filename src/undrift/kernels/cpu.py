"""The functions on a CPU: `cpu_pieces` draws ε in y's memory order, fused with the energy if possible.

√plane·ε is kept for the backward pass, because a CPU has enough memory. There is no second derivative.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from undrift.kernels import reference
from undrift.kernels.cpu_pieces import FLOAT, fill
from undrift.kernels.layout import dense
from undrift.kernels.reference import by_channel


def square_sum(x: Tensor, groups: int, last: bool) -> Tensor:
    """Return Σ x² over each group's channels, in float32 or better: batch × groups × positions (linear: …, 1)."""
    total: Tensor = _CpuSquareSum.apply(x, groups, last)  # type: ignore[no-untyped-call]
    return total


def add_noise(
    y: Tensor, plane: Tensor, log_var: Tensor, key: Tensor, first_row: int, groups: int, last: bool
) -> Tensor:
    """Return y + σ·√plane·ε, with σ² = exp(log_var) of each channel and √plane of its group, in y's dtype."""
    out: Tensor = _CpuAddNoise.apply(y, plane, log_var, key, first_row, groups, last)  # type: ignore[no-untyped-call]
    return out


class _CpuSquareSum(Function):
    """PyTorch's operators, with a gradient from x as it is: autograd would keep 2·x, in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *settings: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.settings = settings
        return reference.square_sum(x, *settings)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return reference.square_sum_gradient(grad, x, *ctx.settings), None, None


class _CpuAddNoise(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, plane: Tensor, log_var: Tensor, *settings: Any) -> Tensor:
        out, kept = noisy(y, plane, log_var, *settings)
        ctx.save_for_backward(plane, log_var, kept)
        ctx.settings = settings[2:]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        plane, log_var, kept = ctx.saved_tensors
        grads: tuple[Tensor | None, Tensor | None] = (None, None)
        if any(ctx.needs_input_grad[1:3]):
            grads = noise_gradients(grad, kept, plane, log_var, *ctx.settings)
        return grad, *grads, None, None, None, None


def noise(y: Tensor, plane: Tensor, key: Tensor, first_row: int, groups: int, last: bool) -> Tensor:
    """Return √plane·ε for an output like y, in y's memory order (a `dense` one) and plane's dtype."""
    along = last or not y.is_contiguous()  # channels are neighbours in memory: each position is a vector
    drawn = torch.empty(y.shape if last or not along else y.movedim(1, -1).shape, **FLOAT)
    positions = (y.shape[1:-1] if last else y.shape[2:]).numel()
    # Both numbers of a pair have one energy, unless they are of two groups.
    inside = plane.dtype is torch.float32 and (last or groups == 1)
    seen = (-1, drawn.shape[-1], 1) if along else (len(y), y.shape[1], positions)
    energy = plane.reshape(*((-1, 1, 1) if along else (len(y), 1, positions))) if inside else None
    fill(drawn.view(seen), key, first_row * positions, energy)
    out = drawn if last or not along else drawn.movedim(-1, 1)
    if inside:
        return out
    out = out.to(plane.dtype)
    if last or groups == 1:
        return out.mul_(plane.sqrt())
    out.unflatten(1, (groups, -1)).mul_(plane.sqrt().unsqueeze(2))
    return out


def noisy(
    y: Tensor, plane: Tensor, log_var: Tensor, key: Tensor, first_row: int, groups: int, last: bool
) -> tuple[Tensor, Tensor]:
    """Return y + σ·√plane·ε and, to keep for the backward pass, √plane·ε; in y's memory order, where it is `dense`."""
    y = y if y.is_contiguous() else dense(y, last)
    kept = noise(y, plane, key, first_row, groups, last)
    sigma = by_channel(_sigma(log_var, plane), y.shape, last)
    # Added in float32 or better, rounded once.
    return torch.addcmul(y.to(kept.dtype), kept, sigma).to(y.dtype), kept


def noise_gradients(
    grad: Tensor, kept: Tensor, plane: Tensor, log_var: Tensor, groups: int, last: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of plane and log_var from what the forward pass kept."""
    if grad.stride() != kept.stride():  # one copy: sums over two orders at once would take longer
        grad = torch.empty_like(kept, dtype=grad.dtype).copy_(grad)
    pull = grad * kept
    sigma = _sigma(log_var, plane)
    if last or not kept.is_contiguous():
        vectors = (pull if last else pull.movedim(1, -1)).flatten(0, -2)
        by_kernel = vectors.sum(0)
        if groups == 1:
            with torch.autocast("cpu", enabled=False):  # a backward pass inside it would multiply in bfloat16
                by_position = (vectors @ sigma).view_as(plane)
        else:
            sums = vectors.unflatten(1, (groups, -1)).mul_(sigma.view(groups, -1)).sum(2)
            by_position = sums.view(len(grad), -1, groups).movedim(2, 1).reshape(plane.shape)
    else:
        flat = pull.flatten(2)
        by_kernel = flat.sum(2).sum(0)
        by_position = flat.unflatten(1, (groups, -1)).mul_(sigma.view(groups, -1, 1)).sum(2).view_as(plane)
    # √plane·ε stands where ε should: divided by plane it is ε / √plane. Where plane is 0 it is 0, whatever divides it.
    grad_plane = (0.5 * by_position).div_(plane.clamp_min(torch.finfo(plane.dtype).smallest_normal))
    return grad_plane, (0.5 * sigma * by_kernel).to(log_var.dtype)


def _sigma(log_var: Tensor, plane: Tensor) -> Tensor:
    return (0.5 * log_var).exp().to(plane.dtype)
