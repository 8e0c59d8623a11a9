"""Question: on PACS sketch → photo, is it the noise that costs 15 points, or how pseudo-labels are looked at?

The cells of `undrift bench analysis --only layers,prior` end at 59 to 62 % with noise anywhere (in one layer alone, or
of a thousandth of a kernel's variance), at 75.8 without it, and at 75.6 with the inert noise of the released code. What
the first share, and the others do not, is the look that SHOT's pseudo-labels are taken by: the mean network under
statistics of its own, from a pass over the domain, where those kept from noisy steps do not fit it; else it is the kept
ones, an average that trails behind (a tenth of each batch).

Here look and noise are exchanged: "kept", "own" and "draw" (one draw under the kept statistics, which fits noise) times
no noise, noise in the last layer, noise everywhere. The same crops, epochs and source network as the cells.

Predicted: the look decides. No noise with "own" ends within 3 points of 60, the last layer's noise with "kept" within 3
of 76. Seen: 60.2 and 75.3; one draw's look with noise everywhere 70.0.

Command:   python benchmarks/look_why.py --data FOLDER --cache FOLDER [--only none-own,last-kept] [--seeds 3]
           (the cache is that of `undrift bench offline`: source networks and decoded images)
Hardware:  a GPU, about a minute a run.
Output:    look-why.json under --results, after each run; what is there is kept.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from undrift._types import Batches
from undrift.likelihood import Shot
from undrift.likelihood.features import latest, watching
from undrift.posterior.batch import to_device
from undrift.posterior.kept_statistics import own_statistics
from undrift.posterior.layers import evaluating
from undrift.posterior.outputs import logits as logits_of
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.state import keeping_noise
from undrift.system.atomic import write_text
from undrift.system.progress import Bar
from undrift_bench.bench.harness.cell import NO_NOISE, Cell, MethodRow
from undrift_bench.bench.harness.measure import machine
from undrift_bench.bench.harness.request import Request
from undrift_bench.bench.offline.run import Adapting
from undrift_bench.bench.offline.sets import SETS
from undrift_bench.bench.offline.sources import setup

NOISE: dict[str, dict[str, Any]] = {"none": NO_NOISE, "last": {"last": 1}, "all": {}}
LOOKS = ("kept", "own", "draw")


@contextmanager
def state(kind: str, model: Perturbed, batches: Batches) -> Iterator[None]:
    """Put the network into the state in which it is looked at, for the length of a `with` block."""
    kept = [policy for policy in model.norms if policy.statistics == "train"]
    own = kind == "own" and any(policy.knows_noise() for policy in kept)  # "noise" or not: they have moved
    domain = (images for _, images in batches())
    statistics = own_statistics(model, domain) if own else nullcontext()
    at_rest = model.rest() if kind == "draw" else model.mean()
    with evaluating(model), keeping_noise(model.key), statistics, at_rest:
        yield


@contextmanager
def looked_at_by(kind: str, truth: Tensor, right: list[list[float]]) -> Iterator[None]:
    """Let SHOT look in this way, and note the part of its labels that is right: of all images, then of each class."""
    look, refresh = Shot._look, Shot.refresh

    @torch.no_grad()
    def other(self: Shot, model: Perturbed, batches: Batches) -> tuple[Tensor, Tensor, Tensor]:
        parts = []
        with state(kind, model, batches), watching(model.net, self.features) as seen:
            for indices, images in batches():
                probs = logits_of(model(to_device(images, model))).softmax(1)
                parts.append((indices.cpu(), latest(seen, self.features).cpu(), probs.float().cpu()))
        indices, features, probs = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return indices, features, probs

    def noted(self: Shot, model: Perturbed, batches: Batches) -> None:
        refresh(self, model, batches)
        assert self.labels is not None, "a refresh gives labels"
        found = (self.labels == truth).float()
        right.append([float(part.mean()) for part in (found, *(found[truth == c] for c in truth.unique()))])

    Shot._look, Shot.refresh = other, noted  # type: ignore[method-assign]
    try:
        yield
    finally:
        Shot._look, Shot.refresh = look, refresh  # type: ignore[method-assign]


def ran(adapting: Adapting, setting: str, noise: str, look: str, seed: int) -> dict[str, Any]:
    """Return what one run ends with, and the part of its labels that is right, epoch by epoch."""
    truth, right = adapting.images(adapting.setup.dataset.task(setting).target).labels, list[list[float]]()
    assert truth is not None, "a benchmark's images have labels"
    row = MethodRow(f"{noise}-{look}", "vmp-shot:paper", NOISE[noise])
    with looked_at_by(look, truth.cpu(), right), Bar("look-why", 1, False) as bar:
        found = adapting(Cell("look-why", "resnet50", setting, row, seed, len(truth)), bar)
    names = ("accuracy", "nll", "ece", "source_accuracy", "seconds")
    by_class = {"labels right": [part for part, *_ in right], "of each class": [parts for _, *parts in right]}
    return {**{name: found[name] for name in names}, **by_class, "images": torch.bincount(truth).tolist()}


def main(words: list[str]) -> None:
    """Run what is missing, print each line, and write it down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--resnet50", type=Path, help="ImageNet's weights, where the cache has no source network")
    parser.add_argument("--task", default="sketch-photo")
    parser.add_argument("--only", default=",".join(f"{noise}-{look}" for noise in NOISE for look in LOOKS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = parser.parse_args(words)
    weights = {} if asked.resnet50 is None else {"resnet50": asked.resnet50}
    request = Request(data=asked.data, cache=asked.cache, device=asked.device, fast=True, weights=weights)
    adapting = Adapting(setup(SETS["pacs"], request), request)
    place = asked.results / "look-why.json"
    result: dict[str, Any] = json.loads(place.read_text(encoding="utf-8")) if place.exists() else {}
    runs = result.setdefault("runs", {})
    for seed in range(asked.seeds):
        for name in asked.only.split(","):
            key = f"{asked.task} {name} s{seed}"
            if key not in runs:
                noise, look = name.split("-")
                runs[key] = machine(request.place) | ran(adapting, asked.task, noise, look, seed)
                asked.results.mkdir(parents=True, exist_ok=True)
                write_text(place, json.dumps(result, indent=1) + "\n")
            right = " ".join(f"{100 * part:.0f}" for part in runs[key]["labels right"])
            print(f"{key}: accuracy {100 * runs[key]['accuracy']:.1f} %; labels right {right}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
