"""Claim: a stream of undrift segments corrupted scenes better than Tent and CoTTA, and better calibrated.

Scenes are scanned digits on photographs (undrift_bench.data.scenes), 64×64, eleven classes per pixel. A small U-Net is
trained on clean scenes. Then the fifteen corruptions follow each other in one stream, at severity 3 and at severity 5,
never reset, in batches of 16. Every answer is scored when it is given: mean intersection over union and pixel error
(all images of a corruption), ECE over 4,096 pixels of each image; means over corruptions. All rows run with the values
that they have for images with one class; nothing was chosen on these scenes.

Command:   python benchmarks/segmentation.py --device cuda              about two minutes on an H200
           python benchmarks/segmentation.py --scenes 64 --seeds 1      a smaller run on a CPU
           python benchmarks/segmentation.py --tiny                     does everything run?
Hardware:  named in the record, results/segmentation.json, from which --page writes the table of docs/how-to/segment.md.
Seeds:     0, 1, 2: training and test scenes, their order, and the methods' own randomness.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import undrift
from undrift.images.corrupt.constants import CORRUPTIONS
from undrift.judge.metrics import Tally
from undrift.system.atomic import write_text
from undrift_bench.bench.harness.measure import machine
from undrift_bench.bench.harness.table import markdown
from undrift_bench.data.scenes import CLASSES, scenes
from undrift_bench.zoo.unet import UNet

BATCH = 16
SEVERITIES = (3, 5)
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "source": ("source", {}),
    "norm-stats": ("norm-stats", {}),
    "tent": ("tent", {}),
    "cotta": ("cotta", {}),
    "undrift-light": ("undrift-light", {}),
    "undrift": ("undrift", {}),
    "undrift, σ = 0": ("undrift", {"init_fraction": 0.0}),
}
NUMBERS = {"miou": "mIoU %", "error": "pixel error %", "ece": "ECE %"}


def trained(seed: int, count: int, epochs: int, device: torch.device) -> UNet:
    """Return a U-Net trained on clean scenes."""
    torch.manual_seed(seed)
    net = UNet(CLASSES).to(device)
    images, labels = scenes("train", count, seed)
    optimiser = torch.optim.AdamW(net.parameters(), 2e-3)
    steps = epochs * -(-count // 32)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, steps)
    order = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for chosen in torch.randperm(count, generator=order).split(32):
            logits = net(images[chosen].to(device).float() / 255)
            loss = nn.functional.cross_entropy(logits, labels[chosen].to(device))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    return net.eval()


def streamed(net: nn.Module, domains: list[tuple[str, Tensor, Tensor]], row: str, seed: int) -> dict[str, Any]:
    """Return the scores of one row's stream, domain by domain."""
    method, settings = ROWS[row]
    tallies = {name: Tally() for name, *_ in domains}
    asked: list[tuple[str, Tensor]] = []

    def camera() -> Iterator[Tensor]:
        for name, images, labels in domains:
            for x, y in zip(images.split(BATCH), labels.split(BATCH), strict=True):
                asked.append((name, y))
                yield x

    torch.manual_seed(seed)
    begun = time.perf_counter()
    with undrift.stream(net, camera(), method=method, **settings) as stream:
        for p in stream:
            name, labels = asked[-1]
            tallies[name].add(p.probs, labels, p.label)
        stream.remove()
    each = {name: tally.scores() for name, tally in tallies.items()}
    own = {name: {n: getattr(scores, n) for n in NUMBERS} for name, scores in each.items()}
    own_means = {n: statistics.fmean(found[n] for found in own.values()) for n in NUMBERS}
    return own_means | {"domains": own, "seconds": time.perf_counter() - begun}


def page(result: dict[str, Any]) -> str:
    """Return the table of a record: mean ± standard deviation over seeds."""
    header = ["method", *(f"{title}, severity {s}" for s in SEVERITIES for title in NUMBERS.values())]
    lines = []
    for row in ROWS:
        cells = []
        for severity in SEVERITIES:
            found = [c for c in result["cells"] if c["row"] == row and c["severity"] == severity]
            for name in NUMBERS:
                values = [100 * c[name] for c in found]
                spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
                cells.append(f"{statistics.fmean(values):.1f}{spread}" if values else "not run")
        lines.append([row, *cells])
    seeds = sorted({c["seed"] for c in result["cells"]})
    about = f"{result['hardware']}; torch {result['torch']}; {result['date']}; seeds {', '.join(map(str, seeds))}; "
    clean = ", ".join(f"{100 * c:.1f}" for c in result["clean"].values())
    about += f"{result['scenes']} scenes per corruption, batches of {BATCH}. Clean mIoU of the sources: {clean} %."
    return f"{about}\n\n{markdown(header, lines)}"


def main() -> None:
    """Run what is asked for, print the table and write the record after each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--scenes", type=int, default=320, help="per corruption")
    parser.add_argument("--train", type=int, default=3000, help="scenes that the source is trained on")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--tiny", action="store_true", help="two corruptions, 32 scenes; nothing is written")
    parser.add_argument("--page", action="store_true", help="print the table of the record, and run nothing")
    asked = parser.parse_args()
    place = asked.results / "segmentation.json"
    if asked.page:
        print(page(json.loads(place.read_text())))
        return
    if asked.tiny:
        asked.seeds, asked.scenes, asked.train, asked.epochs = 1, 32, 64, 1
    device = torch.device(asked.device)
    corruptions = [*CORRUPTIONS][: 2 if asked.tiny else None]
    result: dict[str, Any] = machine(device) | {"scenes": asked.scenes, "clean": {}, "cells": []}
    for seed in range(asked.seeds):
        net = trained(seed, asked.train, asked.epochs, device)
        images, labels = scenes("test", asked.scenes, seed)
        images, labels = images.to(device), labels.to(device)
        pairs = zip(images.split(64), labels.split(64), strict=True)
        clean = undrift.evaluate(net, [(x.float() / 255, y) for x, y in pairs])
        result["clean"][str(seed)] = clean.results[0].scores.miou
        for severity in SEVERITIES:
            domains = []
            for name in corruptions:
                chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
                made = undrift.corrupt(images, name, severity, seed)[chosen.to(device)]
                domains.append((name, made.float() / 255, labels[chosen.to(device)]))
            for row in ROWS:
                found = streamed(net, domains, row, seed)
                result["cells"].append({"row": row, "severity": severity, "seed": seed} | found)
                print(seed, severity, row, {n: round(100 * found[n], 2) for n in NUMBERS}, flush=True)
                if not asked.tiny:
                    write_text(place, json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(page(result))


if __name__ == "__main__":
    main()
