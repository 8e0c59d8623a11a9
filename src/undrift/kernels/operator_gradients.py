"""Gradients of the custom operators, the same for opaque ones and for those that the compiler can inline."""

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from undrift.kernels import reference
from undrift.kernels.layout import dense


def keep_input(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    """Keep what the gradient of Σ x² needs: x as it is, groups, last."""
    x, *ctx.settings = inputs
    ctx.save_for_backward(x)


def of_square_sum(operator: Any, arranged: Callable[[Tensor, bool], Tensor] = lambda grad, _last: grad) -> None:
    """Give an operator for Σ x² its gradient, from a gradient of its result that was `arranged` in memory."""

    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        # In plain operators: a compiler fuses them with the layer's own gradient.
        return reference.square_sum_gradient(arranged(grad, ctx.settings[-1]), x, *ctx.settings), None, None

    operator.register_autograd(backward, setup_context=keep_input)


def of_add_noise(
    operator: Any,
    noise_gradients: Callable[..., tuple[Tensor, Tensor]],
    noise_parts: Callable[..., tuple[Tensor, Tensor]] | None = None,
) -> None:
    """Give an operator for y + σ·√plane·ε its gradients; `noise_gradients` draws ε again.

    With `noise_parts` its last arguments are a handle, which log_var's gradient goes to in as many parts as it has, and
    whether the plane's is read by rows.
    """

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
        _, plane, log_var, key, first_row, groups, last, *shared = inputs
        ctx.save_for_backward(plane, log_var, key)
        ctx.settings = first_row, groups, last
        ctx.parts = None if not shared or shared[0] is None else (shared[0].shape[0], shared[1])
        ctx.rest = len(shared)

    def backward(ctx: Any, grad: Tensor) -> Any:
        (plane, log_var, key), (first_row, groups, last) = ctx.saved_tensors, ctx.settings
        shape, of_plane = grad.shape, plane.shape
        if last:
            # As the layer's own product wants it, one vector a row: a compiler that has yet to write this gradient
            # writes it once for both, and else once for each (a ViT's queries, keys and values: 27 µs a layer).
            grad, plane = grad.reshape(-1, shape[-1]), plane.reshape(-1, of_plane[-1])
            first_row *= math.prod(shape[1:-1])
        grad = dense(grad, last)  # one copy, where there must be one, for us and for the layer
        settings = (first_row, groups, last)
        pull, grad_log_var = None, None
        rest: list[Tensor | None] = [None] * ctx.rest
        if ctx.parts is not None and (ctx.needs_input_grad[1] or ctx.needs_input_grad[7]):
            assert noise_parts is not None
            pull, rest[0] = noise_parts(grad, plane, log_var, key, *settings, *ctx.parts)
        elif ctx.parts is None and any(ctx.needs_input_grad[1:3]):
            pull, grad_log_var = noise_gradients(grad, plane, log_var, key, *settings)
        pull = None if pull is None else pull.view(of_plane)
        return grad.view(shape) if last else grad, pull, grad_log_var, None, None, None, None, *rest

    operator.register_autograd(backward, setup_context=keep)
