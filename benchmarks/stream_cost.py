"""Claim: a step of `undrift` costs at most 7 × Tent's on two cores, and at most 0.35 × CoTTA's on a GPU.

Streams of all rivals take the same batch in turns, in one process, so that their ratios are of the same minutes. A
batch is whatever a user waits for: the answer and the step. Networks have fresh weights, which take the time of trained
ones; hence two choices by hand. CoTTA looks at its 32 views in each batch, as it does on the noises. undrift looks at
all four combinations of its views, as it does where both pass its test, and undrift-light at the mirror image.

"undrift-no-noise" has no noise layers at all, so that its steps hold no trace of them. (The tables' σ = 0 rows keep
the layers with a variance of 0: they are there for the prior of the mean, and cost the same as with noise.)

Bars:  two cores, WRN-40-2, batches of 64: undrift ≤ 7 × Tent, undrift-light ≤ 2.2 × Tent
       H200, WRN-28-10 at 200 and ResNet-50 at 64: undrift ≤ 0.35 × CoTTA and ≤ 1.15 × its twin without noise,
       undrift-light ≤ 1.3 × ROID (WRN-28-10)

Command:   python benchmarks/stream_cost.py [--turns 10] [--threads 2]        two cores: about three minutes
           python benchmarks/stream_cost.py --device cuda --turns 20          one GPU, alone: about 90 s
           python benchmarks/stream_cost.py --tiny                            does everything run?
Output:    stream-cost.json, on a GPU stream-cost-cuda.json, under --results, after each network.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import undrift
from undrift.images import Preprocess
from undrift.system.atomic import write_text
from undrift_bench.bench.harness.measure import machine, wait
from undrift_bench.bench.harness.quickly import by_pass, quickly
from undrift_bench.bench.speed.steps import Case, images

CPU = (Case("WRN-40", 64, 32, width=2),)
GPU = (Case("WRN-28", 200, 32), Case("ResNet-50", 64, 224, classes=1000))
TINY = (Case("WRN-40", 8, 16, width=1),)
BOTH = ("mirror", "shift")
RIVALS: dict[str, tuple[str, dict[str, Any]]] = {
    "tent": ("tent", {}),
    "roid": ("roid", {"preprocess": Preprocess()}),
    "cotta": ("cotta", {"threshold": 1.0, "preprocess": Preprocess()}),
    "undrift": ("undrift", {"views": BOTH}),
    "undrift-no-noise": ("undrift", {"views": BOTH, "layers": (), "test_samples": 0}),
    "undrift-light": ("undrift-light", {"views": "mirror"}),
    "undrift-light-no-noise": ("undrift-light", {"views": "mirror", "layers": (), "test_samples": 0}),
}
RATIOS = (
    *(("undrift", "tent"), ("undrift-light", "tent")),
    *(("undrift", "undrift-no-noise"), ("undrift-light", "undrift-light-no-noise")),
    *(("undrift", "cotta"), ("undrift", "roid"), ("undrift-light", "roid")),
)


def in_turns(
    case: Case, rivals: Sequence[str], device: torch.device, turns: int, warm_up: int
) -> dict[str, list[float]]:
    """Return the milliseconds of each batch of each rival."""
    fast = device.type == "cuda"
    batch = images(case.batch, case.side, device, fast)

    def camera() -> Iterator[Tensor]:
        while True:
            yield batch

    streams = {}
    for name in rivals:
        net = case.build().to(device).eval()
        if fast:  # as the tables' cells run
            net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            by_pass(net, case.batch)
        torch.manual_seed(0)
        method, settings = RIVALS[name]
        streams[name] = undrift.stream(net, camera(), method=method, **settings)
    times: dict[str, list[float]] = {name: [] for name in rivals}
    with quickly(device, fast):
        for turn in range(warm_up + turns):
            for name, stream in streams.items():
                wait(device)
                begun = time.perf_counter()
                next(stream)
                wait(device)
                if turn >= warm_up:
                    times[name].append(1e3 * (time.perf_counter() - begun))
    return times


def summary(times: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians and means, and of each pair of rivals the median over turns of their ratio."""
    ratios = {
        f"{one} / {other}": statistics.median(a / b for a, b in zip(times[one], times[other], strict=True))
        for one, other in RATIOS
        if one in times and other in times
    }
    own = {name: {"median": statistics.median(each), "mean": statistics.fmean(each)} for name, each in times.items()}
    return {"milliseconds": own, "ratios": ratios, "turns": times}


def main() -> None:
    """Measure network by network, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="of a CPU")
    parser.add_argument("--only", default="", help="rivals, with commas between; all of them where it is left out")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--tiny", action="store_true", help="a small network, two turns, nothing written")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    torch.set_num_threads(asked.threads)
    cases = TINY if asked.tiny else GPU if device.type == "cuda" else CPU
    rivals = asked.only.split(",") if asked.only else [n for n in RIVALS if device.type == "cuda" or n != "cotta"]
    place = asked.results / ("stream-cost-cuda.json" if device.type == "cuda" else "stream-cost.json")
    result: dict[str, Any] = machine(device) | {"threads": torch.get_num_threads(), "cases": []}
    for case in cases:
        turns, warm_up = (2, 1) if asked.tiny else (asked.turns, asked.warm_up)
        found = summary(in_turns(case, rivals, device, turns, warm_up))
        print(f"{case.network}, batch {case.batch}")
        for name, own in found["milliseconds"].items():
            print(f"  {name:28} {own['median']:8.1f} ms (mean {own['mean']:.1f})")
        for pair, ratio in found["ratios"].items():
            print(f"  {pair:46} {ratio:.2f}", flush=True)
        result["cases"].append(asdict(case) | found)
        if not asked.tiny and not asked.only:
            write_text(place, json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
