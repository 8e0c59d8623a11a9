"""Question: how many images should a step wait for where they come one by one (`stream(…, gather=)`)?

Few have poor statistics; many leave the first images of a new domain to the statistics of the last one. Sizes 16 to 128
on speckle noise, Gaussian blur and saturate (severity 5), one after another and never reset; never on the fifteen that
results are reported on. WRN-40-2, 1,000 images of each: the longer a domain stays, the more a larger number is worth.
Beside them the source, and single images without gathering, which normalise by themselves.

The rule is that of benchmarks/rates.py: the least error; of values within two standard errors of it, the nearest to 64,
the batch of `undrift stream` and of most who train.

Predicted, error % of norm statistics and of Tent with 1,000 images, before these ran (with 500 of each a trial had
24.5, 24.1, 24.6 and 30.1 for norm statistics, and 24.6 for Tent at 64):

    size              16     32     64     128
    norm statistics   24.0   22.5   22.0   24.0
    Tent              26.0   23.0   21.5   23.5

and the rule takes 64. Seen: 23.3, 21.1, 21.2, 23.5 and 23.9, 21.4, 21.0, 23.3, and it does; 32 cannot be told from it.
The source has 49.7, single images that normalise by themselves 89.8.

Command:   python benchmarks/gather.py --data ../shared/data/cifar10 [--images 1000]
Hardware:  one CPU core, shared with other work: about 25 minutes.
Seeds:     0.
Output:    gather.json under --results, and a table on the terminal.
"""

import argparse
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import undrift
from rates import chosen
from undrift.images.corrupt import DEVELOPMENT
from undrift.system.atomic import write_text
from undrift_bench import zoo
from undrift_bench.bench.harness.measure import machine
from undrift_bench.bench.online.corrupted import development

SIZES, USUAL = (16, 32, 64, 128), 64
METHODS = ("norm-stats", "tent")


def errors(folder: Path, batches: Iterable[Tensor], labels: Tensor, method: str, **ways: Any) -> list[float]:
    """Return the part of the answers that were wrong, for each corruption."""
    torch.manual_seed(0)
    net = zoo.load("wrn40_2", folder / "wrn40_2.safetensors").eval()
    stream = undrift.stream(net, batches, method=method, **ways)
    wrong = torch.cat([answer.label for answer in stream]) != labels
    stream.remove()
    return [float(part.float().mean()) for part in wrong.view(len(DEVELOPMENT), -1)]


def write_beside(place: Path, name: str, one: dict[str, Any]) -> None:
    """Write a record under its name, beside those that a file has already."""
    result: dict[str, Any] = json.loads(place.read_text("utf-8")) if place.is_file() else {}
    write_text(place, json.dumps(result | {name: one}, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    """Run every size with both methods, and write gather.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--images", type=int, default=1_000, help="of each corruption")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    images, labels = development(asked.data, asked.images, torch.device("cpu"))
    begun = time.perf_counter()
    one: dict[str, Any] = machine(torch.device("cpu")) | {"images": asked.images}
    runs = [("source", None), ("norm-stats", None), *((method, size) for method in METHODS for size in SIZES)]
    for method, size in runs:
        found = errors(asked.data, images.split(1), labels, method, gather=size)
        name = "single images" if size is None else str(size)
        one.setdefault(method, {})[name] = found
        shown = " / ".join(f"{100 * part:.1f}" for part in found)
        print(f"| {method} | {name} | {100 * sum(found) / len(found):.2f} | {shown} |", flush=True)
    one["chosen"] = {
        method: chosen({size: sum(one[method][str(size)]) / len(DEVELOPMENT) for size in SIZES}, len(labels), USUAL)
        for method in METHODS
    }
    one["seconds"] = round(time.perf_counter() - begun)
    write_beside(asked.results / "gather.json", f"{asked.images} images", one)
    print(f"The rule takes {one['chosen']}; {one['seconds']} s")


if __name__ == "__main__":
    main()
