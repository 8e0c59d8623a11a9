"""What autograd needs to know of the operators: the same for opaque ones and for those that the compiler looks into."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from undrift.fused import plain, tiles


def of_square_sum(operator: Any) -> None:
    """Give an operator for Σ x² its gradient, 2·x·grad.

    In plain operators: a compiler fuses them with the layer's own gradient. x is kept as it is.
    """

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
        x, *ctx.settings = inputs
        ctx.save_for_backward(x)

    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return plain.square_sum_gradient(grad, x, *ctx.settings), None, None

    operator.register_autograd(backward, setup_context=keep)


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
