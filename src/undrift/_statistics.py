"""A pass over a domain that norm statistics see: one that stays, or one for statistics of the mean network's own."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from undrift._batches import to_device
from undrift.norm import MOVING
from undrift.perturb import Perturbed


@torch.no_grad()
def show(model: Perturbed, batches: Iterable[Tensor], noisy: bool) -> None:
    """Let kept norm statistics move by a pass over the batches; the network is in eval mode."""
    with model.rest() if noisy else model.mean():
        model.key.training = True
        for images in batches:
            model(to_device(images, model))


@contextmanager
def own_statistics(model: Perturbed, batches: Iterable[Tensor]) -> Iterator[None]:
    """Let kept norm statistics be those of the mean network on these batches, for the length of a `with` block."""
    kept = [policy for policy in model.norms if policy.statistics in MOVING]
    # References are enough: an average is a new tensor each time it moves.
    before = [(policy, policy.statistics, policy.noisy, dict(policy.layer._buffers)) for policy in kept]
    try:
        for policy in kept:
            policy.statistics = "domain"  # each batch alike, and nothing of what was there
            count = policy.layer._buffers["num_batches_tracked"]
            policy.layer._buffers["num_batches_tracked"] = None if count is None else torch.zeros_like(count)
        show(model, batches, noisy=False)
        yield
    finally:
        for policy, statistics, noisy, buffers in before:
            policy.statistics, policy.noisy = statistics, noisy
            policy.layer._buffers.update(buffers)
