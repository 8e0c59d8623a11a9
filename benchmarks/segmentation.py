"""Claim: a stream of undrift segments corrupted scenes better than Tent and CoTTA, and as well calibrated as Tent.

Scenes are scanned digits on photographs (undrift_bench.data.scenes), 64×64, eleven classes per pixel. A small U-Net is
trained on clean scenes. Then the fifteen corruptions follow each other in one stream, at severity 3 and at severity 5,
never reset, in batches of 16. Every answer is scored when it is given: mean intersection over union and pixel error
(all images of a corruption), ECE over 4,096 pixels of each image; means over corruptions. All rows run with the values
that they have for images with one class. How views are tested was chosen on such scenes, under development corruptions
(NOTES.md, "Dense predictions").

Predicted, before any of it was run: at severity 5 norm statistics gain 8 points of mIoU over the source, Tent another
half a point with an ECE one point higher. CoTTA loses 3 points on norm statistics, because it averages over mirrored
digits. undrift gains 2 points on Tent, by views and by statistics that remember, with half of Tent's ECE;
undrift-light gains 1. Without noise nothing changes by more than half a point: so short a stream moves no weight far.
Found: the order of undrift, Tent, norm statistics and CoTTA, but not the sizes; undrift-light does not gain.

Command:   python benchmarks/segmentation.py --device cuda              about two minutes on an H200
           python benchmarks/segmentation.py --scenes 16 --train 2000 --epochs 10 --bf16    the record: ten minutes of
           one CPU core, with ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment
           python benchmarks/segmentation.py --tiny                     does everything run?
Hardware:  named in the record, results/segmentation.json, from which benchmarks/readme.py writes the table of
           docs/how-to/segment.md.
Seeds:     0, 1, 2: test scenes, their order, and the methods' own randomness; the source network is one.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import undrift
from undrift.images.corrupt.constants import CORRUPTIONS
from undrift.judge.metrics import Tally
from undrift.system.atomic import write_text
from undrift_bench.bench.harness.measure import machine
from undrift_bench.bench.harness.table import markdown
from undrift_bench.data.scenes import CLASSES, scenes
from undrift_bench.zoo.unet import UNet

BATCH = TRAIN_BATCH = 16
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


def as_input(images: Tensor) -> Tensor:
    """Return images as the network takes them."""
    return (images.float() / 255).contiguous(memory_format=torch.channels_last)


def trained(count: int, epochs: int, device: torch.device, bf16: bool) -> UNet:
    """Return a U-Net trained on clean scenes."""
    torch.manual_seed(0)
    net = UNet(CLASSES).to(device, memory_format=torch.channels_last)
    images, labels = scenes("train", count)
    optimiser = torch.optim.AdamW(net.parameters(), 2e-3)
    steps = epochs * -(-count // TRAIN_BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, steps)
    order = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for chosen in torch.randperm(count, generator=order).split(TRAIN_BATCH):
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):  # a longer block would keep old weights
                logits = net(as_input(images[chosen].to(device)))
            loss = nn.functional.cross_entropy(logits.float(), labels[chosen].to(device))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    return net.eval()


def source(asked: argparse.Namespace, device: torch.device) -> UNet:
    """Return the source network, from its file if that is there."""
    if asked.network is None:
        return trained(asked.train, asked.epochs, device, asked.bf16)
    if not asked.network.is_file():
        learned = trained(asked.train, asked.epochs, device, asked.bf16).state_dict()
        save_file({name: tensor.contiguous() for name, tensor in learned.items()}, asked.network)
    net = UNet(CLASSES)
    net.load_state_dict(load_file(asked.network))
    return net.to(device, memory_format=torch.channels_last).eval()


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
    events = [str(event) for event in stream.report.events]
    return own_means | {"domains": own, "events": events, "seconds": time.perf_counter() - begun}


def cells(
    net: UNet, seed: int, asked: argparse.Namespace, device: torch.device
) -> Iterator[tuple[dict[str, Any], float]]:
    """Yield the scores of each row and severity with the clean mIoU of the source."""
    images, labels = scenes("test", asked.scenes, seed)
    images, labels = images.to(device), labels.to(device)
    pairs = zip(images.split(64), labels.split(64), strict=True)
    precision = torch.autocast(device.type, torch.bfloat16, enabled=asked.bf16)
    with precision:
        clean = undrift.evaluate(net, [(as_input(x), y) for x, y in pairs]).results[0].scores.miou
    assert clean is not None
    chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed)).to(device)
    for severity in asked.severities:
        domains = [
            (name, as_input(undrift.corrupt(images, name, severity, seed)[chosen]), labels[chosen])
            for name in [*CORRUPTIONS][: 2 if asked.tiny else None]
        ]
        for row in asked.rows:
            with precision:
                found = streamed(net, domains, row, seed)
            yield {"row": row, "severity": severity, "seed": seed} | found, clean


def joined(place: Path, result: dict[str, Any]) -> dict[str, Any]:
    """Return the record with what the file has of other seeds and rows, if it was run with the same settings."""
    if not place.is_file():
        return result
    old = json.loads(place.read_text())
    if any(old.get(name) != result[name] for name in ("hardware", "torch", "scenes", "train", "epochs", "bf16")):
        return result
    each = {(c["seed"], c["severity"], [*ROWS].index(c["row"])): c for c in [*old["cells"], *result["cells"]]}
    both = [each[place] for place in sorted(each)]
    return result | {"clean": dict(sorted((old["clean"] | result["clean"]).items())), "cells": both}


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
    about += "bfloat16; " if result["bf16"] else ""
    about += f"{result['scenes']} scenes per corruption, batches of {BATCH}. "
    about += f"mIoU of the source network on clean scenes: {clean} %."
    return f"{about}\n\n{markdown(header, lines)}"


def main() -> None:
    """Run what is asked for, print the table and write the record after each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="those that a record has stay in it")
    parser.add_argument("--bf16", action="store_true", help="bfloat16 autocast, in training and in streams")
    parser.add_argument("--scenes", type=int, default=320, help="per corruption")
    parser.add_argument("--train", type=int, default=3000, help="scenes that the source is trained on")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--rows", nargs="+", default=[*ROWS], choices=[*ROWS], help="others stay in the record")
    parser.add_argument("--severities", type=int, nargs="+", default=[*SEVERITIES], choices=SEVERITIES)
    parser.add_argument("--network", type=Path, help="a file to keep the source network in")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--tiny", action="store_true", help="two corruptions, 32 scenes; nothing is written")
    parser.add_argument("--page", action="store_true", help="print the table of the record, and run nothing")
    asked = parser.parse_args()
    place = asked.results / "segmentation.json"
    if asked.page:
        print(page(json.loads(place.read_text())))
        return
    if asked.tiny:
        asked.seeds, asked.scenes, asked.train, asked.epochs = [0], 32, 64, 1
    device = torch.device(asked.device)
    settings = {name: getattr(asked, name) for name in ("scenes", "train", "epochs", "bf16")}
    result: dict[str, Any] = machine(device) | settings | {"clean": {}, "cells": []}
    net = source(asked, device)
    for seed in asked.seeds:
        for cell, clean in cells(net, seed, asked, device):
            result["clean"][str(seed)] = clean
            result["cells"].append(cell)
            print(seed, cell["severity"], cell["row"], {n: round(100 * cell[n], 2) for n in NUMBERS}, flush=True)
            if not asked.tiny:
                write_text(place, json.dumps(joined(place, result), indent=1, ensure_ascii=False) + "\n")
    print(page(result if asked.tiny else joined(place, result)))


if __name__ == "__main__":
    main()
