"""Question: how often does SAR go back to the source, and what is left of it then?

SAR recovers when a moving average of its loss falls below 0.2, which its authors take for a collapse. A network that is
sure of a benign corruption is there without one. The fifteen corruptions, one after another: steps, batches without a
step and recoveries of each, and the error beside that of norm statistics alone. Nothing is chosen by it.

Predicted before the run: recoveries in most batches where norm statistics err by less than 17 % (defocus, motion and
zoom blur, fog, brightness, contrast), in few on the noises and glass blur; on the former SAR's error is that of norm
statistics to 0.1 points, on the latter 0.3 to 1 below.

    python benchmarks/sar_why.py --data ../shared/data/cifar10 --weights FILE --frost FOLDER
"""

import json
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import undrift
from undrift.images import Preprocess
from undrift.images.corrupt import CORRUPTIONS, corrupt
from undrift_bench import data, zoo
from undrift_bench.bench.harness.measure import machine
from why_options import options

BATCH, COUNTS = 200, ("steps", "missed", "resets")


def main() -> None:
    """Run both streams, and write sar-why.json."""
    parser = options(__doc__, images=1_000)
    parser.add_argument("--network", default="wrn40_2")
    asked = parser.parse_args()
    device, begun = torch.device(asked.device), time.perf_counter()
    clean, labels = next(iter(data.cifar10(asked.data).select(range(asked.images)).batches(10**6)))
    kinds = {name: corrupt(clean.to(device), name, 5, frost=asked.frost) for name in CORRUPTIONS}
    result: dict[str, Any] = {**machine(device), "network": asked.network, "images": asked.images, "batch": BATCH}
    for method in ("norm-stats", "sar"):
        torch.manual_seed(0)
        net = zoo.load(asked.network, asked.weights).to(device).eval()
        result[method] = {}
        for name, found in streamed(net, method, kinds, labels.to(device)):
            result[method][name] = found
            print(f"{time.perf_counter() - begun:6.0f} s  {method}, {name}: {found}", flush=True)
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "sar-why.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def streamed(
    net: torch.nn.Module, method: str, kinds: dict[str, Tensor], labels: Tensor
) -> Iterator[tuple[str, dict[str, float]]]:
    """Give each corruption's error, and how many batches had a step, none, or a recovery."""
    batches = (part for images in kinds.values() for part in images.split(BATCH))
    stream = undrift.stream(net, batches, method=method, preprocess=Preprocess())
    for name, images in kinds.items():
        before = [getattr(stream.report, count) for count in COUNTS]
        answers = torch.cat([next(stream).label for _ in images.split(BATCH)])
        after = [getattr(stream.report, count) for count in COUNTS]
        counts = {count: now - then for count, now, then in zip(COUNTS, after, before, strict=True)}
        yield name, {"error": float((answers != labels).float().mean()), **counts}


if __name__ == "__main__":
    main()
