"""Question: how much longer does an uncompiled VMP step take than Tent's on a GPU, where both are timed in turns?

`undrift bench speed` gives each rival a process of its own, compiles, and takes minutes. Here one process makes an
uncompiled step of each in turns, as it is and as one CUDA graph (`undrift.Captured`): the ratio is of medians over the
same seconds, which is what tells two versions of the kernels, or two machines, apart.

Predicted for version 12, on a machine with slow cores, after a trial without graphs had 1.53, 1.86 and 1.72: the same
(WRN-28-10, ResNet-50, ViT-S/16), and 1.25, 1.36 and 1.38 as one graph.

Command:   python benchmarks/speed_turns_gpu.py [--turns 30]
Hardware:  a GPU, about a minute; on a CPU a tiny network, to see that it runs.
Output:    speed-turns-cuda.json under --results.
"""

import argparse
import json
import statistics
import sys
from functools import partial
from pathlib import Path

import torch

from undrift.system.atomic import write_text
from undrift_bench.bench.harness.measure import laps, machine
from undrift_bench.bench.speed.benchmark import GPU
from undrift_bench.bench.speed.modes import quickest, settings
from undrift_bench.bench.speed.steps import Case, images, make_step

KINDS, WARM_UP = ("tent", "vmp"), 10
TINY = (Case("WRN-40", 2, 8, width=1),)


def in_turns(case: Case, device: torch.device, turns: int) -> dict[str, float]:
    """Return the median milliseconds of each rival's step, as it is and as one graph."""
    low = device.type == "cuda"
    x = images(case.batch, case.side, device, low)
    steps = {
        f"{kind}{', one graph' * graphs}": partial(make_step(kind, case, device, low=low, graphs=graphs and low), x)
        for graphs in (False, True)
        for kind in KINDS
    }
    taken = [[laps(step, device, 1)[0] for step in steps.values()] for _ in range(WARM_UP + turns)][WARM_UP:]
    return {name: 1e3 * statistics.median(column) for name, column in zip(steps, zip(*taken, strict=True), strict=True)}


def main(words: list[str]) -> None:
    """Measure one network after the other; print and write what was found after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--results", type=Path, default=Path(__file__).with_name("results"))
    asked = parser.parse_args(words)
    device = torch.device(asked.device)
    record = machine(device) | settings(device) | {"turns": asked.turns, "networks": {}}
    asked.results.mkdir(parents=True, exist_ok=True)
    with quickest():
        for case in GPU if device.type == "cuda" else TINY:
            found = in_turns(case, device, asked.turns)
            ratios = [found[f"vmp{how}"] / found[f"tent{how}"] for how in ("", ", one graph")]
            record["networks"][case.network] = found | {"ratio": ratios[0], "ratio, one graph": ratios[1]}
            print(f"{case.network}: VMP over Tent {ratios[0]:.2f}, as one graph {ratios[1]:.2f}", found, flush=True)
            if device.type == "cuda":  # a tiny network's numbers stand for nothing
                write_text(asked.results / "speed-turns-cuda.json", json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
