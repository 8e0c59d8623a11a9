"""Question: is the σ that offline VMP learns the data's, or the KL's alone?

Takes the finished cells of `undrift bench analysis --only sigma` and adapts the same network once more for each, with
the same options, number of images, batches and epochs, and nothing asked of the images: a likelihood of 0, so that only
the KL moves σ. Images are noise of 32 pixels, as nobody looks at them; weights are fresh ones, as σ over its kernel's
deviation depends on none. A CPU, minutes a cell.

Predicted: in the cells ln(σ/start) divided by the weights of a kernel is 3.5e-4 to 3.7e-4 in every convolution, which
is what a pull of (weights of a kernel)/2N a step would do. So the KL alone gives the same σ to a hundredth.

    python benchmarks/sigma_why.py --results benchmarks/results
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import undrift
from undrift.judge import shift
from undrift.system.atomic import write_bytes
from undrift_bench import zoo
from undrift_bench.bench.analysis.sigma import spearman
from undrift_bench.bench.harness.measure import machine


def nothing(logits: Tensor) -> Tensor:
    """Ask nothing."""
    return 0.0 * logits.sum()


def by_kl(record: dict[str, Any], network: str = "shot_resnet50", side: int = 32) -> dict[str, tuple[float, int]]:
    """Return σ over its kernel's deviation after KL alone, and the weights that share one σ, by layer."""
    torch.manual_seed(0)
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in record["options"].items()}
    model = undrift.perturb(zoo.build(network, 7), undrift.Options(**options))
    images = torch.rand(record["images"], 3, side, side)
    undrift.adapt(model, images, nothing, record["epochs"], batch_size=record["batch"], generator=torch.Generator())
    weights = {name: module.weight for name, module in model.net.named_modules() if hasattr(module, "weight")}
    return {
        row.layer: (row.relative[0], weights[row.layer].numel() // row.variances)
        for row in shift.sigma(model)
        if row.layer in weights
    }


def compare(record: dict[str, Any], alone: dict[str, tuple[float, int]]) -> dict[str, Any]:
    """Return how the σ of a cell differs from the KL's, and whether it goes with kernel size or with A-distance."""
    layers = [name for name in record["sigma"] if name in alone]
    learned = [record["sigma"][name]["relative"] for name in layers]
    growth = [math.log(s / record["sigma"][name]["start_relative"]) for s, name in zip(learned, layers, strict=True)]
    sizes = [alone[name][1] for name in layers]
    return {
        "layers": {
            name: {"weights": alone[name][1], "learned": s, "kl alone": alone[name][0], "growth a weight": g / n}
            for name, s, g, n in zip(layers, learned, growth, sizes, strict=True)
        },
        "most difference": max(abs(s / alone[name][0] - 1) for name, s in zip(layers, learned, strict=True)),
        "rank correlation of growth with": {
            "weights of a kernel": spearman(growth, sizes),
            "A-distance": spearman(growth, [record["a_distance"][name] for name in layers]),
        },
    }


def main() -> None:
    """Compare every finished cell, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True)
    asked = parser.parse_args()
    found: dict[str, Any] = machine(torch.device("cpu")) | {"tasks": {}}
    for path in sorted((asked.results / "analysis").glob("*.sigma_*.looked-into.*.s0.json")):
        record = json.loads(path.read_text())
        task = record["setting"].removeprefix("sigma ")
        found["tasks"][task] = one = compare(record, by_kl(record))
        write_bytes(asked.results / "sigma-why.json", json.dumps(found, indent=1).encode())
        ranks = ", ".join(f"{name} {value:+.2f}" for name, value in one["rank correlation of growth with"].items())
        print(f"{task}: σ differs from the KL's by at most {one['most difference']:.3%}; growth goes with {ranks}")


if __name__ == "__main__":
    main()
