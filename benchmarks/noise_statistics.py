"""Question: may the mean network use norm statistics that were kept from noisy passes?

A source network of PACS (ResNet-50, `undrift train pacs`), images of another domain, nothing learned. Statistics are
averages over the images' batches, once of noisy passes and once of passes without noise; the network is asked with and
without noise under both. And in steps of a stream (a noisy pass a batch, whose statistics are kept): what does a second
look without noise have by these statistics, and what by the batch's own, as `Step.mean_logits` takes them?

    python benchmarks/noise_statistics.py --data ../shared/data/pacs --source photo.safetensors --target sketch
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import undrift
from undrift._types import Step
from undrift_bench import data, zoo
from undrift_bench.bench.harness.measure import machine
from undrift_bench.train import load_source

BATCH = 48


@torch.no_grad()
def accuracies(source: Path, images: Tensor, labels: Tensor, noisy: bool, fraction: float) -> dict[str, float]:
    """Return the accuracy without noise and with draws, by statistics of noisy passes or of passes without noise."""
    net = load_source(source)[0].to(images.device).eval()
    model = undrift.perturb(net, norm_statistics="domain", init_fraction=fraction, generator=torch.Generator())
    model.key.noisy = noisy
    for part in images.split(BATCH):
        model(part)
    model.key.noisy = True
    found = {}
    for name, samples in (("without noise", 0), ("one draw", 1), ("three draws", 3)):
        answer = undrift.predict(model, images, samples, generator=0, batch_size=BATCH)
        found[name] = float((answer.label == labels).float().mean())
    return found


@torch.no_grad()
def in_steps(source: Path, images: Tensor, labels: Tensor, fraction: float) -> dict[str, float]:
    """Return the accuracy of each step's draw, and of second looks without noise."""
    model = undrift.perturb(
        load_source(source)[0].to(images.device).eval(),
        norm_statistics="train",
        norm_momentum=1.0,
        init_fraction=fraction,
        generator=torch.Generator(),
    )
    answers: dict[str, list[Tensor]] = {}
    for part in images.split(BATCH):
        model.key.training = True
        draw = model(part)
        by_batch = Step(model, part, model).mean_logits()
        with model.mean():
            kept = model(part)
        looks = {"the draw": draw, "without noise, by the draw's": kept, "without noise, by the batch's own": by_batch}
        for name, logits in looks.items():
            answers.setdefault(name, []).append(logits.argmax(1))
    return {name: float((torch.cat(labelled) == labels).float().mean()) for name, labelled in answers.items()}


def main() -> None:
    """Ask, print and write noise-statistics.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--source", type=Path, required=True, help="a network that was trained on another domain")
    parser.add_argument("--target", default="sketch")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--images", type=int, default=192)
    parser.add_argument("--fraction", type=float, default=0.01, help="σ² over a kernel's variance")
    asked = parser.parse_args()
    device, domain = torch.device(asked.device), data.pacs(asked.data, asked.target)
    some = torch.randperm(len(domain), generator=torch.Generator().manual_seed(0))[: asked.images].tolist()
    images, labels = next(iter(domain.select(some).prepared(zoo.preprocess("resnet50")).batches(10**6)))
    about = {"source": asked.source.stem, "target": asked.target, "images": asked.images, "fraction": asked.fraction}
    result: dict[str, Any] = {**machine(device), **about, "accuracy": {}}
    for noisy in (True, False):
        of = "statistics of noisy passes" if noisy else "statistics of passes without noise"
        found = accuracies(asked.source, images.to(device), labels.to(device), noisy, asked.fraction)
        result["accuracy"][of] = found
        print(of, found, flush=True)
    result["in_steps"] = in_steps(asked.source, images.to(device), labels.to(device), asked.fraction)
    print("in steps", result["in_steps"], flush=True)
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "noise-statistics.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
