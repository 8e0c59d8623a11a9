"""What storing a mean costs: one exact pack stored again in every way, and what each way answers."""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import undrift
from undrift.packs.compression import mean_shifts, trained_weights
from undrift.posterior.kept_statistics import update_by_pass
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.state import keeping_noise

EXACT = "exact"
AGAIN = "+statistics"
"""Ends the name of a way whose norm statistics are taken again under the compressed weights."""

WAYS = (EXACT, "ternary", "0.5-bit", "1-bit", "1.5-bit", EXACT + AGAIN, "1.5-bit" + AGAIN)
LOOKED_AT = 1_000
"""Images that statistics are taken again from."""


def stored_ways(
    net: nn.Module,
    exact: Path,
    images: Tensor,
    labels: Tensor,
    ways: Sequence[str] = WAYS,
    size: int = 250,
    **how: Any,
) -> dict[str, dict[str, float]]:
    """Return bytes, accuracy, KL from the exact pack's answers and error of the shifts, by way of storing a pack.

    Answers are those of packs: kept statistics, the model's own draws and views, the same noise for every way.

    Args:
        net: the source network, plain, on its device; it is left so.
        exact: a pack saved with mean="exact".
        images: of the target, prepared, on any device; they are answered, and statistics are taken again from them.
        labels: theirs.
        ways: names of schemes of `undrift.save`, alone or with "+statistics"; "exact" is always there, and first.
        size: images of a batch.
        how: to answer, as `Packs.predict` takes it: `samples`, `views`; by default as the pack says.
    """
    found, wanted = dict[str, dict[str, float]](), torch.empty(0)
    with tempfile.TemporaryDirectory() as folder:
        for way in (EXACT, *(way for way in ways if way != EXACT)):
            begun = time.perf_counter()
            place, one = stored_again(net, exact, Path(folder), way, images, size)
            seconds = time.perf_counter() - begun
            probs = answers(net, place, images, size, **how)
            wanted = probs if way == EXACT else wanted
            kl = (wanted * (wanted.clamp_min(1e-12) / probs.clamp_min(1e-12)).log()).sum(1)
            right = float((probs.argmax(1) == labels.cpu()).float().mean())
            found[way] = {**one, "accuracy": right, "kl": float(kl.mean()), "seconds": seconds}
    return found


def stored_again(
    net: nn.Module, exact: Path, folder: Path, way: str, images: Tensor, size: int
) -> tuple[Path, dict[str, float]]:
    """Store an exact pack in another way; return where, its bytes and what was lost."""
    place, scheme = folder / f"{way}.safetensors", way.removesuffix(AGAIN)
    model = undrift.load(net, exact)
    try:
        found = {"shift error": lost(model, scheme), "bytes": float(undrift.save(model, place, mean=scheme))}
        if way.endswith(AGAIN):
            model.remove()
            model = undrift.load(net, place)
            look_again(model, images[:: max(1, len(images) // LOOKED_AT)], size)
            # Multiples of a step are stored as they are: the weights stay those that were looked at.
            found["bytes"] = float(undrift.save(model, place, mean=scheme))
    finally:
        model.remove()
    return place, found


def look_again(model: Perturbed, images: Tensor, size: int) -> None:
    """Replace moving norm statistics by those of some images, with the noise that the model answers with."""
    policies = [policy for policy in model.norms if policy.statistics in ("train", "moving")]
    before = [policy.statistics for policy in policies]
    for policy in policies:
        policy.statistics = "domain"  # all batches count equally, earlier statistics not at all
        if (count := policy.layer._buffers["num_batches_tracked"]) is not None:
            count.zero_()
    model.eval()
    with keeping_noise(model.key):
        update_by_pass(model, images.split(size), noisy=model.options.test_samples > 0)
    for policy, statistics in zip(policies, before, strict=True):
        policy.statistics = statistics


def answers(net: nn.Module, file: Path, images: Tensor, size: int, **how: Any) -> Tensor:
    """Return one pack's probabilities, in float64 on the CPU."""
    packs = undrift.packs(net, file)
    device = next(net.parameters()).device
    with packs.using(packs.names[1]):
        parts = [packs.predict(part.to(device), generator=0, **how).probs for part in images.split(size)]
    return torch.cat(parts).cpu().double()


def lost(model: Perturbed, scheme: str) -> float:
    """Return the relative error of all compressed shifts together."""
    weights, wrong, whole = trained_weights(model), 0.0, 0.0
    for name, shift in mean_shifts(model, scheme).items():
        source, adapted = (weight.detach().float().cpu() for weight in weights[name])
        wrong += float((shift.dense() - (adapted - source)).square().sum())
        whole += float((adapted - source).square().sum())
    return (wrong / whole) ** 0.5 if whole else 0.0
