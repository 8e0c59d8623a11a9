"""Kept norm statistics: whether they fit the mean network, and new ones from a pass over the domain."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from undrift._errors import OptionError
from undrift.posterior.batch import to_device
from undrift.posterior.layers import evaluating
from undrift.posterior.norm import MOVING
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.state import keeping_noise, noisy_statistics
from undrift.system.private import write_count
from undrift.system.warning import warn

INERT = 0.02  # σ over a kernel's standard deviation below which statistics hardly change; as released it is 0.001

# Each network's statistics, with their version, when they were last checked; None after a warning.
_looked_at: "weakref.WeakKeyDictionary[Perturbed, tuple[Tensor, int] | None]" = weakref.WeakKeyDictionary()


def noise_kept(model: Perturbed) -> float:
    """Return the largest noise in kept norm statistics, as σ over a kernel's standard deviation.

    0 if they fit the mean network: batch statistics, the source's, or those moved without (noticeable) noise. Noise
    that is only behind the last norm layer reaches no statistics, but counts here.
    """
    attached = model._attached
    if attached.aside or attached.removed or not noisy_statistics(model):  # off: the source's are in place
        return 0.0
    sizes = [noise.relative_std().mean() for noise in model.noises()]
    largest = float(torch.stack([size.to(sizes[0]) for size in sizes]).max())  # one transfer
    return largest if largest > INERT else 0.0


def warn_of_mean(model: Perturbed) -> None:
    """Warn, once per network, if it answers without noise and its kept norm statistics come from noisy passes.

    Every prediction without draws calls this. Statistics that have not moved since the last call are not checked again,
    nor are those that the replay of a CUDA graph moved.
    """
    if model.options.norm_statistics not in MOVING or (seen := _looked_at.get(model, (None, 0))) is None:
        return
    kept = next((p.layer._buffers["running_mean"] for p in model.norms if p.statistics in MOVING), None)
    if kept is None:
        return
    version = write_count(kept)  # filling in writes into the same tensor
    if seen[0] is kept and seen[1] == version:
        return
    size = noise_kept(model)
    _looked_at[model] = None if size else (kept, version)
    if size:
        asked = "samples=0 asks the network without noise; needed: draws, or statistics of its own"
        warn_of_noise(size, asked, "Ask for samples=1 or more, or export(model, path, images=…).")


def warn_of_noise(size: float, asked: str, to_do: str) -> None:
    """Warn that statistics kept from passes with noise of that size do not fit a network without it."""
    warn(
        f"norm statistics were kept from passes with noise (σ up to {size:.2f} of a kernel's standard deviation), and "
        f"{asked}, without which a deep network may lose half of its accuracy. {to_do}"
    )


@torch.no_grad()
def update_by_pass(model: Perturbed, batches: Iterable[Tensor], noisy: bool) -> None:
    """Move kept norm statistics by a pass over the batches, in eval mode."""
    with model.rest() if noisy else model.mean():
        model.key.training = True
        for images in batches:
            model(to_device(images, model))


def move_statistics(model: Perturbed, batches: Callable[[], Iterable[tuple[Tensor, Tensor]]]) -> None:
    """Let moving norm statistics see the domain once, with noise as in a step; batch statistics need no pass."""
    if model.options.norm_statistics == "source":
        raise OptionError(
            'statistics_first with norm_statistics="source": statistics that stay the source\'s cannot be adapted. '
            'Perturb with norm_statistics="moving", or leave statistics_first out.'
        )
    if model.options.norm_statistics in MOVING:
        with evaluating(model):
            update_by_pass(model, (images for _, images in batches()), noisy=model.options.train_samples > 0)


@contextmanager
def own_statistics(model: Perturbed, batches: Iterable[Tensor]) -> Iterator[None]:
    """Use norm statistics of the mean network on these batches, for the length of a `with` block."""
    kept = [policy for policy in model.norms if policy.statistics in MOVING]
    # References suffice, as an average becomes a new tensor each time it moves.
    before = [(policy, policy.statistics, policy.noisy, dict(policy.layer._buffers)) for policy in kept]
    try:
        for policy in kept:
            policy.statistics = "domain"  # all batches count equally, earlier statistics not at all
            count = policy.layer._buffers["num_batches_tracked"]
            policy.layer._buffers["num_batches_tracked"] = None if count is None else torch.zeros_like(count)
        update_by_pass(model, batches, noisy=False)
        yield
    finally:
        for policy, statistics, noisy, buffers in before:
            policy.statistics, policy.noisy = statistics, noisy
            policy.layer._buffers.update(buffers)


def keep_statistics(model: Perturbed, batches: Iterable[Tensor]) -> None:
    """Keep the statistics of a domain in norm layers that normalise by their batch, which does not change them.

    A router answers one image at a time, and for that the layers need statistics of the whole domain.
    """
    kept = [policy for policy in model.norms if policy.statistics == "batch"]
    flags = [policy.by_batch for policy in kept]
    try:
        for policy in kept:
            policy.statistics, policy.by_batch = "domain", False
            if (count := policy.layer._buffers["num_batches_tracked"]) is not None:
                count.zero_()
        with keeping_noise(model.key), evaluating(model):
            update_by_pass(model, batches, noisy=bool(model.noise and model.options.train_samples))
    finally:
        for policy, flag in zip(kept, flags, strict=True):
            policy.statistics, policy.by_batch = "batch", flag


@contextmanager
def fitting_mean(model: Perturbed, batches: Iterable[Tensor]) -> Iterator[None]:
    """Give the mean network with statistics that fit it, for the length of a `with` block.

    If the kept ones come from noisy passes, its own are collected on the batches; otherwise the batches are not read.
    """
    own = own_statistics(model, batches) if noise_kept(model) else nullcontext()
    with keeping_noise(model.key), own, model.mean():
        yield
