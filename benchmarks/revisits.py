"""Claim: a stream with packs comes back to a domain as it left it.

Some corruptions of CIFAR-10 (severity 5) come one after another, and again, on other images each time. With `packs=()`
the stream knows a domain again by its moments, and puts back what it had learned there. The question is the error on
the first batches of the second and later visits, against the last batches of the first visit; the control is the same
stream without packs.

Predicted: with packs, first batches of later visits within 1 point of the last batches of the first visit, on the mean;
without packs several points worse, most for methods that learn much.

Command:   python benchmarks/revisits.py --data ../shared/data/cifar10 [--method undrift] [--development]
Hardware:  a GPU; with --images 256 --batch 64 --visits 2 --fast, one CPU core that computes in bfloat16, 5 minutes.
Seeds:     0.
Output:    revisits.json under --results, and a table on the terminal.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import undrift
from undrift.images.corrupt import DEVELOPMENT, corrupt
from undrift_bench import zoo
from undrift_bench.bench.harness.measure import machine
from undrift_bench.bench.harness.quickly import quickly
from undrift_bench.bench.harness.request import Request
from undrift_bench.data import cifar10

FIVE = ("gaussian_noise", "glass_blur", "snow", "contrast", "jpeg_compression")
WAYS: dict[str, dict[str, Any]] = {"with packs": {"packs": ()}, "without": {}}


def page(record: dict[str, Any]) -> str:
    """Return the table for docs/explanation/routing.md."""
    parts = ("first visit, last batches", "second visit, first batch", "later visits, first batches", "error")
    lines = [f"| error % | | {' | '.join(parts[:3])} | all |", "|---|---|---:|---:|---:|---:|"]
    for one in record.values():
        title = (
            f"{one['network']}, `{one['method']}`, {len(one['corruptions'])} corruptions, {one['visits']} visits of "
        )
        how = one["hardware"] + ", bfloat16" * one.get("fast", False)
        title += f"{one['images']:,} images in batches of {one['batch']} ({how})"
        for way, found in one["ways"].items():
            lines.append(f"| {title} | {way} | " + " | ".join(f"{found[part]:.1f}" for part in parts) + " |")
            title = ""
    return "\n".join(lines)


def main() -> None:
    """Run the stream with and without packs, and write revisits.json."""
    from gather import write_beside  # beside this script, which `readme.py` also reads from elsewhere

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--network", default="wrn40_2")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--method", default="undrift")
    parser.add_argument("--images", type=int, default=2_000, help="of a visit")
    parser.add_argument("--batch", type=int, default=200)
    parser.add_argument("--visits", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--fast", action="store_true", help="channels-last and bfloat16")
    parser.add_argument("--development", action="store_true", help="development corruptions, not five of the fifteen")
    asked = parser.parse_args()
    device = Request(device=asked.device).place
    domains = DEVELOPMENT if asked.development else FIVE
    clean = cifar10(asked.data)
    assert clean.labels is not None
    per_visit = asked.images // asked.batch
    batches: list[tuple[int, int, torch.Tensor, torch.Tensor]] = []
    for visit in range(asked.visits):
        rows = torch.arange(visit * asked.images, (visit + 1) * asked.images) % len(clean)
        for number, name in enumerate(domains):
            images, labels = corrupt(clean.images[rows], name, 5), clean.labels[rows]
            parts = torch.arange(len(rows)).split(asked.batch)
            batches += [(visit, number, images[part], labels[part]) for part in parts]
    found: dict[str, Any] = {}
    for way in asked.ways:
        torch.manual_seed(0)
        net = zoo.load(asked.network, asked.weights or asked.data / "wrn40_2.safetensors").to(device).eval()
        if asked.fast:
            net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        begun = time.perf_counter()
        camera = (images.to(device).float() / 255 for _, _, images, _ in batches)
        stream = undrift.stream(net, camera, method=asked.method, **WAYS[way])
        wrong, names = [], []
        with quickly(device, asked.fast):
            for (_, _, _, labels), answer in zip(batches, stream, strict=True):
                wrong.append(100 * float((answer.label.cpu() != labels).float().mean()))
                names.append(stream.domain)
        seconds = time.perf_counter() - begun
        stream.remove()
        visits = torch.tensor(wrong).view(asked.visits, len(domains), per_visit)
        edge = max(1, per_visit // 5)
        found[way] = {
            "error": statistics.fmean(wrong),
            "first visit, last batches": float(visits[0, :, -edge:].mean()),
            "second visit, first batch": float(visits[1, :, 0].mean()),
            "later visits, first batches": float(visits[1:, :, 0].mean()),
            "later visits, last batches": float(visits[1:, :, -edge:].mean()),
            "by batch": wrong,
            "domains": names,
            "seconds": seconds,
        }
        short = {key: round(value, 2) for key, value in found[way].items() if isinstance(value, float)}
        print(way, short, names if names[0] else "", flush=True)
    record = machine(device) | {"corruptions": list(domains), "visits": asked.visits, "images": asked.images}
    record |= {"batch": asked.batch, "network": asked.network, "method": asked.method, "fast": asked.fast}
    record["ways"] = found
    write_beside(asked.results / "revisits.json", f"{asked.network}, {asked.method}, {', '.join(domains)}", record)


if __name__ == "__main__":
    main()
