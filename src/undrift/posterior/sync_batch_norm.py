"""Synchronised batch norm: statistics over the images of all processes, and the gradient through them.

    M = Σ x / n,   V = Σ (x − M)² / n      over all positions, of the images of all processes

In its own forward pass, each layer normalises its rows by M and V as by running statistics. If g is the gradient of the
loss with M and V held fixed, the whole gradient is

    g − Σ g / n − (x − M) / (V + ε) · Σ g (x − M) / n
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from undrift.kernels.reference import wide
from undrift.system.ranks import Share


class BatchStatistics(NamedTuple):
    """Mean and (biased) variance of each channel over the batches of all processes, and the number of values."""

    mean: Tensor
    var: Tensor
    values: Tensor


@torch.no_grad()
def batch_statistics(x: Tensor, share: Share) -> BatchStatistics:
    """Return the statistics of a batch, of which this process has the rows x."""
    x = x.to(wide(x.dtype))
    mean = x.mean(_all_but_channels(x))
    # Each from its own mean, and joined after: a difference of squares would lose digits where a mean is large.
    away = (x - _by_channel(mean, x)).reshape(*x.shape[:2], -1)
    squares = torch.linalg.vector_norm(away, dim=2).square().sum(0)
    rows = share.each(torch.cat([mean, squares, mean.new_tensor([x.numel() // x.shape[1]])]))
    means, squares, counts = rows.split([len(mean), len(mean), 1], 1)
    count = counts.sum()
    whole = (counts * means).sum(0) / count
    var = (squares + counts * (means - whole).square()).sum(0) / count
    return BatchStatistics(whole, var, count)


def with_gradient(x: Tensor, found: BatchStatistics, epsilon: float, share: Share) -> Tensor:
    """Return x for a layer that holds these statistics fixed, with the gradient that flows through them added."""
    return _WithGradient.apply(x, found, epsilon, share) if x.requires_grad else x  # type: ignore[no-untyped-call]


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, found: BatchStatistics, epsilon: float, share: Share) -> Tensor:
        ctx.save_for_backward(x, found.mean, found.var + epsilon, found.values)
        ctx.share = share
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        x, mean, var, count = ctx.saved_tensors
        g, x = gradient.to(mean.dtype), x.to(mean.dtype)
        one = torch.ones_like(mean)
        # PyTorch's own kernels read g and x once for both sums, and once more for the result.
        _, products, sums = torch.ops.aten.native_batch_norm_backward(
            g, x, None, None, None, mean, one, True, 0.0, [False, True, True]
        )
        sums, products = ctx.share.total(torch.stack([sums, products])) / count
        g = functional.batch_norm(x, mean, one, -products / var, -sums, eps=0.0).add_(g)
        return g.to(gradient.dtype), None, None, None


def _all_but_channels(x: Tensor) -> tuple[int, ...]:
    return 0, *range(2, x.ndim)


def _by_channel(values: Tensor, x: Tensor) -> Tensor:
    return values.view(-1, *[1] * (x.ndim - 2))
