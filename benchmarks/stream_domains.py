"""Question: by what should a stream tell which of several domains that it knows a batch is of?

Seven domains near and far: the three development corruptions of CIFAR-10 at severities 3 and 5, and clean images. Each
is known by the moments of some images of WRN-40-2, and windows of others look for their own.

    evidence    the least mean evidence of the window's images (docs/explanation/routing.md)
    votes       the domain that most of the images belong to by their sketches
    sketches    the greatest mean discriminant of their sketches: what `undrift.stream` does

Rule: the highest share of windows that find their own domain, over all sizes; within 0.5 points the simpler.

Command:   python benchmarks/stream_domains.py --data ../shared/data/cifar10 [--cache FILE]
Hardware:  one CPU core, 10 minutes.
Seeds:     none.
Output:    stream_domains.json under --results, and a table on the terminal.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from undrift.images.corrupt import DEVELOPMENT, corrupt
from undrift.packs.evidence import Gathering
from undrift.packs.moments import ImageMoments, watching
from undrift.packs.router import Router
from undrift.system.atomic import write_text
from undrift_bench import zoo
from undrift_bench.bench.harness.measure import machine
from undrift_bench.data import cifar10

DOMAINS = (("clean", 0), *((name, severity) for severity in (5, 3) for name in DEVELOPMENT))
IMAGES, FIRST, STRIDE = 5_000, 1_000, 200
KNOWN, WINDOWS = (32, 64, 1_000), (32, 64)
WAYS = ("evidence", "votes", "sketches")


@torch.no_grad()
def looked_at(data: Path) -> list[ImageMoments]:
    """Return the moments of each domain's images under the source network."""
    net, clean = zoo.load("wrn40_2", data / "wrn40_2.safetensors").eval(), cifar10(data).images[:IMAGES]
    found = []
    for name, severity in DOMAINS:
        parts = []
        with watching(net) as watch:
            for part in (corrupt(clean, name, severity) if severity else clean).split(100):
                net(part.float() / 255)
                seen = watch.moments()
                assert seen is not None
                parts.append(seen)
        found.append(
            ImageMoments(parts[0].layers, *(torch.cat([getattr(p, k) for p in parts]) for k in ("mean", "var")))
        )
        print(f"looked at {name}, severity {severity}", flush=True)
    return found


def some(seen: ImageMoments, which: slice) -> ImageMoments:
    """Return some of the images."""
    return ImageMoments(seen.layers, seen.mean[which], seen.var[which])


def found_by(router: Router, window: ImageMoments) -> dict[str, int]:
    """Return the number of the domain that each way finds."""
    routes = router.routes(window)
    return {
        "evidence": int(routes.evidence[:, 1:].mean(0).argmin()),
        "votes": int(routes.nearest.mode().values) - 1,
        "sketches": router.names.index(router.pack_of_all(window)) - 1,
    }


def share(domains: list[ImageMoments], known: int, size: int) -> dict[str, float]:
    """Return the share of windows that find their own domain, by way."""
    moments = {}
    for number, seen in enumerate(domains):
        gathering = Gathering()
        gathering.add(some(seen, slice(0, known)))
        moments[str(number)] = gathering.moments(whole=True)
    router = Router({"source": None, **moments}, torch.device("cpu"))
    right: list[Tensor] = []
    for number, seen in enumerate(domains):
        for first in range(FIRST, len(seen) - size, STRIDE):
            found = found_by(router, some(seen, slice(first, first + size)))
            right.append(torch.tensor([found[way] == number for way in WAYS]))
    return dict(zip(WAYS, torch.stack(right).double().mean(0).tolist(), strict=True))


def page(record: dict[str, Any]) -> str:
    """Return the table for docs/explanation/routing.md."""
    lines = [f"| windows that find their domain, % | {' | '.join(WAYS)} |", "|---|" + "---:|" * len(WAYS)]
    for one in record["found"]:
        title = f"{one['window']} images; domains known by {one['known']:,}"
        lines.append(f"| {title} | " + " | ".join(f"{100 * one[way]:.1f}" for way in WAYS) + " |")
    return "\n".join([*lines, "", f"{record['hardware']}, {record['date']}: `benchmarks/stream_domains.py`."])


def main() -> None:
    """Compare the ways, and write stream_domains.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--cache", type=Path, help="file for what the network saw")
    asked = parser.parse_args()
    if asked.cache is not None and asked.cache.is_file():
        domains = [ImageMoments(*state) for state in torch.load(asked.cache)]
    else:
        domains = looked_at(asked.data)
        if asked.cache is not None:
            torch.save([(dict(seen.layers), seen.mean, seen.var) for seen in domains], asked.cache)
    found = [{"known": k, "window": size, **share(domains, k, size)} for k in KNOWN for size in WINDOWS]
    record = machine(torch.device("cpu")) | {"domains": DOMAINS, "found": found}
    write_text(asked.results / "stream_domains.json", json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    print(page(record))


if __name__ == "__main__":
    main()
