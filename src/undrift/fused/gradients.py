"""What autograd needs to know of the operators: the same for opaque ones and for those that the compiler looks into."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from undrift.fused import plain, tiles


def keep_input(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    """Keep what `square_sum_backward` needs: x as it is, groups, last."""
    x, *ctx.settings = inputs
    ctx.save_for_backward(x)


def square_sum_backward(ctx: Any, grad: Tensor) -> Any:
    """Return 2·x·grad in plain operators: a compiler fuses them with the layer's own gradient."""
    (x,) = ctx.saved_tensors
    return plain.square_sum_gradient(grad, x, *ctx.settings), None, None


def of_square_sum(operator: Any) -> None:
    """Give an operator for Σ x² its gradient."""
    operator.register_autograd(square_sum_backward, setup_context=keep_input)


def of_add_noise(operator: Any, noise_gradients: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """Give an operator for y + σ·√plane·ε its gradients; `noise_gradients` draws ε again."""

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
        _, plane, log_var, key, *ctx.settings = inputs
        ctx.save_for_backward(plane, log_var, key)

    def backward(ctx: Any, grad: Tensor) -> Any:
        grads: Any = (None, None)
        grad = tiles.dense(grad, ctx.settings[-1])  # one copy, where there must be one, for us and for the layer
        if any(ctx.needs_input_grad[1:3]):
            grads = noise_gradients(grad, *ctx.saved_tensors, *ctx.settings)
        return grad, *grads, None, None, None, None

    operator.register_autograd(backward, setup_context=keep)
