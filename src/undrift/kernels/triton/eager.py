"""The functions with Triton's kernels in uncompiled code, one at a time, for layers whose noise is not one node.

The backward pass draws ε again. There is no second derivative.
"""

from typing import Any

from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from undrift.kernels.triton import launch


def square_sum(x: Tensor, groups: int, last: bool) -> Tensor:
    """Return Σ x² over each group's channels, in float32: batch × groups × positions (linear: …, 1)."""
    total: Tensor = _LaunchSquareSum.apply(x, groups, last)  # type: ignore[no-untyped-call]
    return total


def add_noise(
    y: Tensor, plane: Tensor, log_var: Tensor, key: Tensor, first_row: int, groups: int, last: bool
) -> Tensor:
    """Return y + σ·√plane·ε, with σ² = exp(log_var) of each channel and √plane of its group, in y's dtype."""
    out: Tensor = _LaunchAddNoise.apply(y, plane, log_var, key, first_row, groups, last)  # type: ignore[no-untyped-call]
    return out


class _LaunchSquareSum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *settings: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.settings = settings
        return launch.square_sum(x, *settings)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return launch.square_sum_gradient(grad, x, *ctx.settings), None, None


class _LaunchAddNoise(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, plane: Tensor, log_var: Tensor, key: Tensor, *settings: Any) -> Tensor:
        ctx.save_for_backward(plane, log_var, key)
        ctx.settings = settings
        return launch.add_noise(y, plane, log_var, key, *settings)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        plane, log_var, key = ctx.saved_tensors
        grads: tuple[Tensor | None, Tensor | None] = (None, None)
        if any(ctx.needs_input_grad[1:3]):
            grads = launch.noise_gradients(grad, plane, log_var, key, *ctx.settings)
        return grad, *grads, None, None, None, None
