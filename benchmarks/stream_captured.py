"""What does `undrift.stream(…, captured=True)` save, and what is left of VMP's price over Tent in a stream?

Tent and VMP (σ per kernel in linear layers too, one draw), each as it is and captured; uncompiled, channels-last,
bfloat16, answers from the step's own pass (`answer="before"`). All four streams of a network take turns in one process,
batch by batch, so that a slow moment is everybody's; medians, after the batches in which graphs are recorded.

Predictions and outcomes are in benchmarks/NOTES.md, version 10.

    python benchmarks/stream_captured.py --out benchmarks/results
"""

import argparse
import json
import platform
import statistics
import time
from datetime import datetime, timezone
from itertools import repeat
from pathlib import Path
from typing import Any

import torch

import undrift
from undrift.system.atomic import write_bytes
from undrift_bench.bench.speed.modes import quickest, settings
from undrift_bench.bench.speed.steps import Case

CASES = {
    "WRN-28-10, batch 200": Case("WRN-28", 200, 32),
    "ResNet-50, batch 64": Case("ResNet-50", 64, 224, classes=1000),
    "ViT-S/16, batch 64": Case("ViT", 64, 224, classes=1000),
}
SETTLING = 10
METHODS: dict[str, dict[str, Any]] = {"tent": {}, "vmp": {"linear_sharing": "kernel"}}


def times(case: Case, device: str, rounds: int) -> dict[str, float]:
    """Return the median milliseconds a batch of each stream."""
    images = torch.randn(case.batch, 3, case.side, case.side, device=device)
    images = images.contiguous(memory_format=torch.channels_last)
    streams = {}
    for method, options in METHODS.items():
        for captured in (False, True):
            net = case.build().to(device, memory_format=torch.channels_last).eval()
            how = {"method": method, "answer": "before", "captured": captured, **options}
            streams[f"{method}{', captured' if captured else ''}"] = undrift.stream(net, repeat(images), **how)
    took: dict[str, list[float]] = {name: [] for name in streams}
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        for turn in range(SETTLING + rounds):
            for name, stream in streams.items():
                wait(device)
                begun = time.perf_counter()
                next(stream)
                wait(device)
                if turn >= SETTLING:
                    took[name].append(1e3 * (time.perf_counter() - begun))
    return {name: statistics.median(values) for name, values in took.items()}


def wait(device: str) -> None:
    """Wait for a GPU's work."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def table(found: dict[str, dict[str, float]]) -> str:
    """Return milliseconds and ratios as Markdown."""
    names = ["tent", "tent, captured", "vmp", "vmp, captured"]
    ratios = (("vmp", "tent"), ("vmp, captured", "tent, captured"), ("vmp, captured", "tent"))
    header = ["stream", *(f"{name}, ms" for name in names), *(f"{one} / {other}" for one, other in ratios)]
    lines = [header, ["---", *["---:"] * (len(header) - 1)]]
    for case, ms in found.items():
        numbers = [*(f"{ms[name]:.1f}" for name in names), *(f"{ms[one] / ms[other]:.2f}" for one, other in ratios)]
        lines.append([case, *numbers])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    """Measure, print, write after each network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--tiny", action="store_true", help="a small WideResNet alone: does it run?")
    asked = parser.parse_args()
    machine = torch.cuda.get_device_name() if asked.device == "cuda" else platform.processor()
    about = {"machine": machine, "torch": torch.__version__, "date": datetime.now(timezone.utc).isoformat()[:10]}
    about |= settings(torch.device(asked.device))
    found: dict[str, dict[str, float]] = {}
    with quickest():
        for name, case in ({"tiny": Case("WRN-28", 4, 32, width=1)} if asked.tiny else CASES).items():
            found[name] = times(case, asked.device, asked.rounds)
            record = about | {"rounds": asked.rounds, "milliseconds": found}
            write_bytes(asked.out / "stream-captured.json", json.dumps(record, indent=1).encode())
    print(table(found))


if __name__ == "__main__":
    main()
