"""Question: how large a memory do steps want where classes come in runs (`stream(…, gather=, balanced=True)`)?

A small one has poor statistics, and is soon full of images of the present run that were taken for other classes; a
large one keeps images of a domain that is gone. Sizes 64 to 256 on speckle noise, Gaussian blur and saturate (severity
5), one after another and never reset; never on the fifteen that results are reported on. WRN-40-2, 2,000 images of each
in batches of 50, sorted by class (runs of 200), and once more in their own order, to see what the memory costs where
nothing is wrong. Beside them the source, and steps on each batch.

The rule is that of benchmarks/rates.py, for sorted images: the least error; of values within two standard errors of it,
the nearest to 64.

Predicted, error % of norm statistics, from a first form of the memory (steps were made while it held one class alone,
and nothing in it was ever too old), which had 37.7 at 64, 30.3 at 128 and 31.1 at 256, sorted, and 80.7 by each batch:

    size               64     128    256    each batch   source
    sorted             35.0   29.0   30.0   80.7         50.2
    their own order           23.0          20.5

and the rule takes 128. Seen: 37.9, 30.3 and 31.1, each batch 80.7, the source 50.2; in their own order 21.2 and 19.0.
It does.

Command:   python benchmarks/balanced.py --data ../shared/data/cifar10 [--images 2000]
Hardware:  one CPU core, shared with other work: about 15 minutes.
Seeds:     0.
Output:    balanced.json under --results, and a table on the terminal.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from gather import errors, write_beside
from rates import chosen
from undrift.images.corrupt import DEVELOPMENT
from undrift_bench.bench.harness.measure import machine
from undrift_bench.bench.online.corrupted import development

SIZES, USUAL, BATCH = (64, 128, 256), 64, 50
METHOD = "norm-stats"
RUNS = [
    *(("sorted", METHOD, size) for size in SIZES),
    ("sorted", "source", None),
    *(("their own order", METHOD, size) for size in (128, None)),
    ("sorted", METHOD, None),
]


def main() -> None:
    """Run every size in both orders, and write balanced.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--images", type=int, default=2_000, help="of each corruption")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    images, labels = development(asked.data, asked.images, torch.device("cpu"))
    own = torch.arange(len(labels))
    by_class = torch.cat([part[labels[part].argsort(stable=True)] for part in own.split(asked.images)])
    begun = time.perf_counter()
    one: dict[str, Any] = machine(torch.device("cpu")) | {"images": asked.images, "batch": BATCH}
    for arrival, method, size in RUNS:
        order = by_class if arrival == "sorted" else own
        ways = {} if size is None else {"gather": size, "balanced": True}
        found = errors(asked.data, images[order].split(BATCH), labels[order], method, **ways)
        name = "each batch" if size is None else str(size)
        one.setdefault(arrival, {}).setdefault(method, {})[name] = found
        shown = " / ".join(f"{100 * part:.1f}" for part in found)
        print(f"| {arrival} | {method} | {name} | {100 * sum(found) / len(found):.2f} | {shown} |", flush=True)
    found = one["sorted"][METHOD]
    one["chosen"] = chosen({s: sum(found[str(s)]) / len(DEVELOPMENT) for s in SIZES}, len(labels), USUAL)
    one["seconds"] = round(time.perf_counter() - begun)
    write_beside(asked.results / "balanced.json", f"{asked.images} images", one)
    print(f"The rule takes {one['chosen']}; {one['seconds']} s")


if __name__ == "__main__":
    main()
