"""Define the functions in PyTorch's own operators: differentiable by autograd, for any device and dtype.

`last` says that channels are the last dimension (linear layers); else they are dimension 1 (convolutions).
"""

import math
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from undrift.kernels.epsilon import normal, normal_planes


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return float32, or the dtype itself where it holds more.

    `torch.promote_types` is an operator: PyTorch 2.6 writes it into an exported program, and cannot read it back.
    """
    return dtype if dtype in (torch.float64, torch.complex64, torch.complex128) else torch.float32


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Return a context without autocast; most of the time there is none to leave, and entering takes its time."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def square_sum(x: Tensor, groups: int, last: bool) -> Tensor:
    """Return Σ x² over each group's channels, in float32 or better: batch × groups × positions (linear: …, 1)."""
    x = x.to(wide(x.dtype))
    if last:
        return x.square().sum(-1, keepdim=True)
    if groups == 1:
        return x.square().sum(1, keepdim=True)
    return x.square().unflatten(1, (groups, -1)).sum(2)


def box_filter(plane: Tensor, pool: tuple[tuple[int, ...], ...]) -> Tensor:
    """Return the sum over each window, given its size, stride and padding; () is a window of one input."""
    if not pool:
        return plane
    window, stride, padding = pool
    return F.avg_pool2d(plane, window, stride, padding, divisor_override=1)


def add_noise(
    y: Tensor, plane: Tensor, log_var: Tensor, key: Tensor, first_row: int, groups: int, last: bool
) -> Tensor:
    """Return y + σ·√plane·ε, with σ² = exp(log_var) of each channel and √plane of its group, in y's dtype."""
    std = by_channel((0.5 * log_var).exp().to(plane.dtype), y.shape, last) * spread(
        safe_sqrt(plane), y.shape, groups, last
    )
    noise = std * drawn(key, y.shape, first_row, last).to(plane.dtype)
    # Noise in float32, cast last: autocast must not turn its outputs into float32.
    return (y + noise).to(y.dtype)


def noise_gradients(
    grad: Tensor, plane: Tensor, log_var: Tensor, key: Tensor, first_row: int, groups: int, last: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of plane and log_var for a gradient of `add_noise`'s output; ε is drawn again.

    grad_plane = Σ_{o in g} grad·σ·ε / (2√plane), 0 where plane is 0; grad_log_var = ½ Σ_{n, p} grad·σ·√plane·ε.
    """
    root = safe_sqrt(plane)
    pull = grad.to(plane.dtype) * drawn(key, grad.shape, first_row, last).to(plane.dtype)
    pull = pull * by_channel((0.5 * log_var).exp().to(plane.dtype), grad.shape, last)
    by_position = pull.sum(-1, keepdim=True) if last else pull.unflatten(1, (groups, -1)).sum(2)
    others = tuple(range(pull.ndim - 1)) if last else (0, *range(2, pull.ndim))
    by_kernel = 0.5 * (pull * spread(root, grad.shape, groups, last)).sum(others)
    positive = plane > 0
    grad_plane = torch.where(positive, 0.5 * by_position / torch.where(positive, root, 1), 0)
    return grad_plane, by_kernel.to(log_var.dtype)


def drawn(key: Tensor, shape: torch.Size, first_row: int, last: bool) -> Tensor:
    """Return ε for an output of that shape. A linear layer's rows are its vectors, however many an image has."""
    if not last:
        return normal_planes(key, shape, first_row)
    vectors = math.prod(shape[1:-1])
    return normal(key, (shape[0] * vectors, shape[-1]), first_row * vectors).view(shape)


def safe_sqrt(x: Tensor) -> Tensor:
    """Return √x with slope 0 at 0: the root's own slope there is infinite, and ReLU makes all-zero windows."""
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, 1).sqrt(), 0)


def by_channel(values: Tensor, shape: torch.Size, last: bool) -> Tensor:
    """Return one value per channel, shaped to meet an output of that shape."""
    return values if last else values.view(-1, *(1,) * (len(shape) - 2))


def spread(planes: Tensor, shape: torch.Size, groups: int, last: bool) -> Tensor:
    """Return one plane per group as one plane per output channel, or the plane itself where it broadcasts."""
    if last or groups == 1:
        return planes
    return planes.unsqueeze(2).expand(-1, -1, shape[1] // groups, *planes.shape[2:]).flatten(1, 2)


def square_sum_gradient(grad: Tensor, x: Tensor, groups: int, last: bool) -> Tensor:
    """Return x · 2·grad, the gradient of `square_sum`, in x's dtype."""
    return (x * spread(2 * grad, x.shape, groups, last)).to(x.dtype)
