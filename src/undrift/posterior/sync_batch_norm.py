"""Synchronised batch norm: statistics over the images of all processes, and the gradient through them.

    M = Σ x / n,   V = Σ (x − M)² / n      over all positions, of the images of all processes

In its own forward pass, each layer normalises its rows by M and V as by running statistics. If g is the gradient of the
loss with M and V held fixed, the whole gradient is

    g − Σ g / n − (x − M) / (V + ε) · Σ g (x − M) / n
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

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
    squares = _products(x - _by_channel(mean, x), None)
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
        g, away = gradient.to(mean.dtype), x.to(mean.dtype) - _by_channel(mean, x)
        sums = ctx.share.total(torch.cat([g.sum(_all_but_channels(g)), _products(g, away)])) / count
        first, second = sums.split(len(mean))
        g = torch.addcmul(g, away, _by_channel(-second / var, x)).sub_(_by_channel(first, x))
        return g.to(gradient.dtype), None, None, None


def _products(a: Tensor, b: Tensor | None) -> Tensor:
    """Return Σ a·b of each channel; of a with itself without b."""
    a = a.flatten(2) if a.ndim > 2 else a.unsqueeze(2)
    b = a if b is None else b.flatten(2) if b.ndim > 2 else b.unsqueeze(2)
    return torch.linalg.vecdot(a, b).sum(0)


def _all_but_channels(x: Tensor) -> tuple[int, ...]:
    return 0, *range(2, x.ndim)


def _by_channel(values: Tensor, x: Tensor) -> Tensor:
    return values.view(-1, *[1] * (x.ndim - 2))
