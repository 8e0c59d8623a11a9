"""Question: how much longer does a VMP step take than Tent's on a GPU, where both are timed in turns?

`undrift-bench bench speed` gives each rival a process of its own and takes minutes. Here one process makes a step of
each in turns: uncompiled, uncompiled as one CUDA graph (`undrift.Captured`), and with `--compiled` also as a compiled
graph. The ratio is of medians over the same seconds, which is what tells two versions of the kernels, or two machines,
apart.

Command:   python benchmarks/speed_turns_gpu.py [--turns 30] [--compiled] [--networks ResNet-50 ViT-S/16]
Hardware:  a GPU, about a minute, with --compiled four; on a CPU a tiny network, to see that it runs.
Output:    speed-turns-cuda.json under --results, written after each turn; networks that a run of the same day and
           machine measured stay in it.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from undrift.system.atomic import write_text
from undrift_bench.bench.harness.measure import laps, machine
from undrift_bench.bench.speed.benchmark import GPU
from undrift_bench.bench.speed.modes import quickest, settings
from undrift_bench.bench.speed.steps import Case, images, make_step

KINDS, WARM_UP = ("tent", "vmp"), 10
TINY = (Case("WRN-40", 2, 8, width=1),)


def in_turns(
    case: Case, device: torch.device, turns: int, modes: dict[str, dict[str, bool]]
) -> Iterator[dict[str, float]]:
    """Give after each turn the median milliseconds of each rival's step in each mode, and the ratios."""
    low = device.type == "cuda"
    x = images(case.batch, case.side, device, low)
    steps = {
        kind + mode: partial(make_step(kind, case, device, low=low, **how), x)
        for mode, how in modes.items()
        for kind in KINDS
    }
    taken = list[list[float]]()
    for _ in range(WARM_UP + turns):
        taken.append([laps(step, device, 1)[0] for step in steps.values()])
        columns = zip(*taken[WARM_UP:], strict=True)
        if found := {n: 1e3 * statistics.median(column) for n, column in zip(steps, columns, strict=False)}:
            yield found | {f"ratio{mode}": found[f"vmp{mode}"] / found[f"tent{mode}"] for mode in modes}


def begun(place: Path, about: dict[str, Any]) -> dict[str, Any]:
    """Return the record to go on with: that of an earlier run like this one, or a new one."""
    had = json.loads(place.read_text(encoding="utf-8")) if place.exists() else {}
    return about | {"networks": had["networks"] if had and about.items() <= had.items() else {}}


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
    asked.results.mkdir(parents=True, exist_ok=True)
    place = asked.results / "speed-turns-cuda.json"
    record = begun(place, machine(device) | settings(device) | {"turns": asked.turns})
    with quickest():
        for case in GPU if gpu else TINY:
            if asked.networks and case.network not in asked.networks:
                continue
            found = dict[str, float]()
            for found in in_turns(case, device, asked.turns, modes):
                record["networks"][case.network] = found
                if gpu:  # a tiny network's numbers stand for nothing
                    write_text(place, json.dumps(record, indent=1) + "\n")
            said = ", ".join(f"{found[f'ratio{mode}']:.2f}{mode.replace(',', '')}" for mode in modes)
            print(f"{case.network}: VMP over Tent {said}", found, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
