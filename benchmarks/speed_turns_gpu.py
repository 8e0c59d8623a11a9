"""Question: how much longer does a VMP step take than Tent's on a GPU, where both are timed in turns?

`undrift-bench bench speed` gives each rival a process of its own and takes minutes. Here one process makes a step of
each in turns: uncompiled, uncompiled as one CUDA graph (`undrift.Captured`), and with `--compiled` also as a compiled
graph. The ratio is of medians over the same seconds, which is what tells two versions of the kernels, or two machines,
apart.

Command:   python benchmarks/speed_turns_gpu.py [--turns 30] [--compiled] [--networks ResNet-50 ViT-S/16]
Hardware:  a GPU, about a minute, with --compiled four; on a CPU a tiny network, to see that it runs.
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


def in_turns(case: Case, device: torch.device, turns: int, modes: dict[str, dict[str, bool]]) -> dict[str, float]:
    """Return the median milliseconds of each rival's step in each mode."""
    low = device.type == "cuda"
    x = images(case.batch, case.side, device, low)
    steps = {
        kind + mode: partial(make_step(kind, case, device, low=low, **how), x)
        for mode, how in modes.items()
        for kind in KINDS
    }
    taken = [[laps(step, device, 1)[0] for step in steps.values()] for _ in range(WARM_UP + turns)][WARM_UP:]
    return {name: 1e3 * statistics.median(column) for name, column in zip(steps, zip(*taken, strict=True), strict=True)}


def main(words: list[str]) -> None:
    """Measure one network after the other; print and write what was found after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--compiled", action="store_true", help="also measure compiled steps, each as one CUDA graph")
    parser.add_argument("--networks", nargs="+", help="only these")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--results", type=Path, default=Path(__file__).with_name("results"))
    asked = parser.parse_args(words)
    device = torch.device(asked.device)
    gpu = device.type == "cuda"
    modes: dict[str, dict[str, bool]] = {"": {}, ", one graph": {"graphs": gpu}}
    if asked.compiled:
        modes[", compiled, one graph"] = {"compiled": True, "graphs": gpu}
    record = machine(device) | settings(device) | {"turns": asked.turns, "networks": {}}
    asked.results.mkdir(parents=True, exist_ok=True)
    with quickest():
        for case in GPU if gpu else TINY:
            if asked.networks and case.network not in asked.networks:
                continue
            found = in_turns(case, device, asked.turns, modes)
            ratios = {f"ratio{mode}": found[f"vmp{mode}"] / found[f"tent{mode}"] for mode in modes}
            record["networks"][case.network] = found | ratios
            said = ", ".join(
                f"{ratio:.2f}{mode.replace(',', '')}" for mode, ratio in zip(modes, ratios.values(), strict=True)
            )
            print(f"{case.network}: VMP over Tent {said}", found, flush=True)
            if gpu:  # a tiny network's numbers stand for nothing
                write_text(asked.results / "speed-turns-cuda.json", json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
