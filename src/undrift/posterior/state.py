"""The adapted state of a network: its modes, snapshots and restoring."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from undrift._errors import PerturbationMismatch
from undrift.posterior.norm import MOVING
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.seeds import Key
from undrift.system.interrupts import surely


@contextmanager
def norm_momentum(model: Perturbed, momentum: float) -> Iterator[None]:
    """Move norm statistics with another momentum for the length of a `with` block."""
    paces = [policy.momentum for policy in model.norms]
    for policy in model.norms:
        policy.momentum = momentum
    try:
        yield
    finally:
        for policy, pace in zip(model.norms, paces, strict=True):
            policy.momentum = pace


@contextmanager
def keeping_noise(key: Key) -> Iterator[None]:
    """Restore the noise's state at the end of a `with` block."""
    seed, put_back_step = key.seed.clone(), _step_to_put_back(key)

    def put_back() -> None:
        put_back_step()
        key.seed.copy_(seed)

    try:
        yield
    finally:
        surely(put_back)


@contextmanager
def keeping_step(key: Key) -> Iterator[None]:
    """Restore the noise's step at the end of a `with` block, unless it is reseeded meanwhile."""
    put_back = _step_to_put_back(key)
    try:
        yield
    finally:
        surely(put_back)


def _step_to_put_back(key: Key) -> Callable[[], None]:
    """Return a function that restores the noise's step as it is now."""
    step = key.step.clone()
    kept = key.calls, key.current, key.stale, key.replay.recording

    def put_back() -> None:
        key.step.copy_(step)
        key.calls, key.current, key.stale, key.replay.recording = kept

    return put_back


def noisy_statistics(model: Perturbed) -> bool:
    """Return whether some kept norm statistics come from noisy passes, and so do not fit the mean network."""
    if not model.noise or not model.options.train_samples:  # steps without noise fit the mean network
        return False
    kept = [policy for policy in model.norms if policy.statistics in MOVING]
    # First what is known, as looking up waits for a GPU.
    return any(policy.noisy for policy in kept) or any(policy.knows_noise() for policy in kept)


def quiet_statistics(model: Perturbed) -> bool:
    """Return whether norm statistics are kept and none come from noisy passes: only the mean network fits them."""
    return any(policy.statistics in MOVING for policy in model.norms) and not noisy_statistics(model)


@contextmanager
def one_pass(model: Perturbed) -> Iterator[Perturbed]:
    """Set the network so that a single pass represents its answers, for the length of a `with` block.

    That is the mean network, or one draw if kept statistics come from noisy passes. Statistics do not move, and the
    step is restored at the end, so that later noise is unchanged.
    """
    with keeping_noise(model.key), model.rest() if noisy_statistics(model) else model.mean():
        yield model


@contextmanager
def noise_switched(key: Key, noisy: bool) -> Iterator[None]:
    """Switch noise on or off for the length of a `with` block."""
    before, key.noisy = key.noisy, noisy
    try:
        yield
    finally:
        key.noisy = before


@contextmanager
def extra_pass(model: Perturbed, noisy: bool) -> Iterator[Perturbed]:
    """Give the network for a pass beside the step's own: norm layers work as in a step, but statistics do not move.

    With `rest()`, "train" would use the moved average instead of the batch's statistics, and noisy averages do not fit
    the mean network: in steps of a ResNet-50 on sketches it was right for 17 %, with batch statistics for 40
    (benchmarks/noise_statistics.py).
    """
    # A pace of 0 keeps an average; the average over a domain has no pace, so all but "train" rest.
    with noise_switched(model.key, noisy), model.rest(), norm_momentum(model, 0.0):
        model.key.training = model.options.norm_statistics == "train"
        yield model


def named_learnables(model: Perturbed) -> dict[str, nn.Parameter]:
    """Return what is trained of the network itself (norm affine, weights), without log-variances, by name."""
    return {n: p for n, p in model.named_parameters() if p.requires_grad and not n.startswith("noise.")}


def named_sources(model: Perturbed) -> dict[str, Tensor]:
    """Return the source's values of `named_learnables`, by the same names; the tensors themselves, not copies."""
    waiting = {
        id(held.layer._parameters[name]): tensor
        for held in (*model.norms, *model.trained)
        for name, tensor in held.away.items()
        if tensor is not None and held.layer._parameters.get(name) is not None
    }
    for change in model.changes():
        # Where U is 0 nothing is changed, whatever V is.
        waiting[id(change.left)], waiting[id(change.right)] = torch.zeros_like(change.left), change.right.detach()
    return {n: waiting[id(p)] for n, p in named_learnables(model).items()}


def adapted(model: Perturbed) -> dict[str, Tensor]:
    """Return all that adaptation changes, by name in the state dict: learnables, norm state and noise state."""
    model.settle()  # a plain pass that Ctrl-C stopped has not
    tensors: dict[str, Tensor] = {n: p for n, p in model.named_parameters() if p.requires_grad}
    norms = {id(b) for policy in model.norms for b in policy.layer._buffers.values() if b is not None}
    tensors |= {n: b for n, b in model.named_buffers() if id(b) in norms}
    return tensors | {"key.seed": model.key.seed, "key.step": model.key.step}


def snapshot(model: Perturbed) -> dict[str, Tensor]:
    """Return a copy of the adapted state."""
    return {name: tensor.detach().clone() for name, tensor in adapted(model).items()}


@torch.no_grad()
def restore(model: Perturbed, state: Mapping[str, Tensor]) -> None:
    """Restore an adapted state, all of it or nothing."""
    own = adapted(model)
    wrong = [n for n in own.keys() | state.keys() if n not in own or n not in state or own[n].shape != state[n].shape]
    if wrong:
        raise PerturbationMismatch(
            f"the saved state and this network differ in {', '.join(sorted(wrong)[:5])} ({len(wrong)} in all); every "
            "name and shape has to be the same. Perturb the same network with the same options."
        )
    for name, tensor in own.items():
        tensor.copy_(state[name])
    forget_noise_seen(model)


@torch.no_grad()
def restore_source(model: Perturbed) -> None:
    """Restore the source's weights and norm statistics; the noise stays, and the mean network is the source."""
    model.settle()
    for held in (*model.norms, *model.trained):
        for name, own in held.tensors().items():
            source = held.away[name]
            if own is not None and source is not None:
                own.copy_(source)
    for change in model.changes():
        change.left.zero_()
    forget_noise_seen(model)


def forget_noise_seen(model: Perturbed) -> None:
    """Forget whether kept statistics have seen noise, because others took their place."""
    for policy in model.norms:
        policy.noisy = False


def likelihood_state(likelihood: object) -> dict[str, Any]:
    """Return a likelihood's state, if it has one."""
    state = getattr(likelihood, "state_dict", None)
    return {} if state is None else state()


def fill_likelihood(likelihood: object, state: dict[str, Any], model: Perturbed) -> None:
    """Restore a likelihood's state."""
    load = getattr(likelihood, "load_state_dict", None)
    if load is not None:
        load(state) if isinstance(likelihood, nn.Module) else load(state, model)


def weights_moved() -> None:
    """Drop autocast's copies of the weights, which it otherwise keeps to the end of its block.

    Without this a stream inside one long autocast block would answer with its first weights for ever.
    """
    torch.clear_autocast_cache()
