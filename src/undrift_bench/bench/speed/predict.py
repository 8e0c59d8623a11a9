"""Time predictions: ten draws, "fast" and the mean network, over one noise-free pass in the same mode.

`undrift bench speed --only predict` and benchmarks/predict.py, which has the predictions' quality too, both time them
here.
"""

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from undrift.answer.fast_mode import THIRD
from undrift.perturb import perturb
from undrift.posterior.perturbed import Perturbed
from undrift.predict import predict
from undrift_bench.bench.harness.measure import laps
from undrift_bench.bench.speed.modes import quickest
from undrift_bench.bench.speed.steps import images

FORM = f"two draws, and a third for {THIRD:.0%} in the same pass"
"""What "fast" is at present: numbers of another form do not speak for it."""
DRAWS = 10
Ask = Callable[[Perturbed, Tensor], object]
WAYS: dict[str, Ask] = {
    "full, folded": lambda model, x: predict(model, x, DRAWS),
    "full, one pass a draw": lambda model, x: predict(model, x, DRAWS, fold_limit=0),
    "fast": lambda model, x: predict(model, x, DRAWS, mode="fast"),
    "samples=0": lambda model, x: predict(model, x, 0),
}


def lap(ask: Callable[[], object], device: torch.device, low: bool) -> float:
    """Return the wall time of one call in seconds.

    It has an autocast block of its own, as in use: a longer one would cast weights that ask for gradients once for all
    calls (the plain network's), and frozen ones (the perturbed network's) at every pass.
    """

    def call() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=low):
            ask()

    return laps(call, device, 1)[0]


Clock = Callable[[Callable[[], object], torch.device, bool], float]


def times(
    net: nn.Module,
    device: torch.device,
    batches: list[int],
    low: bool,
    repeats: int,
    settling: int = 3,
    clock: Clock = lap,
) -> Iterator[dict[str, Any]]:
    """Give the median time of each way to predict over that of one noise-free forward pass.

    Args:
        net: for images of 32 × 32, on the device, in eval mode.
        low: channels-last and bfloat16 autocast.
        repeats: calls that count, after `settling` ones that do not.
        clock: times one call, as `lap` does.
    """
    if low:
        net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model = perturb(net, norm_statistics="source")
    with quickest(), torch.no_grad():
        for batch in batches:
            x = images(batch, 32, device, low)
            base, *taken = medians(model, x, low, repeats, settling, clock)
            for way, seconds in zip(WAYS, taken, strict=True):
                yield {"batch": batch, "way": way, "ratio": seconds / base, "forward_ms": 1e3 * base}
    model.remove()


def medians(model: Perturbed, x: Tensor, low: bool, repeats: int, settling: int = 3, clock: Clock = lap) -> list[float]:
    """Return the median wall times of a noise-free forward pass and of each way to predict, in seconds.

    In turns: on a machine that is slow for a while, ratios of what was measured minutes apart say little.
    """
    taken: list[list[float]] = []
    for _ in range(settling + repeats):  # what a process does for the first times counts for none
        with model.off() as plain:
            found = [clock(partial(plain, x), x.device, low)]
        taken.append(found + [clock(partial(ask, model, x), x.device, low) for ask in WAYS.values()])
    return [statistics.median(column) for column in zip(*taken[settling:], strict=True)]
