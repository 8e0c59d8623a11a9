"""The shared source models reach the accuracies written beside them, loaded strictly by `undrift_bench.zoo`.

Claim (clean test images, float32, no adaptation):
    WRN-40-2, CIFAR-10 test                93.5 %
    ResNeXt-29, CIFAR-100 test             73.0 %
    ResNet-50 (v1 layout), ImageNet val5k  75.1 % on the original files, 74.7 % on 2,000 of these re-compressed ones

Command: python benchmarks/zoo.py --data ../shared/data --out out/zoo [--resnet50 FILE] [--limit N] [--device cuda]
Hardware: any. One CPU thread takes 2 minutes for WRN-40-2, 12 for ResNeXt-29, 18 for ResNet-50; `--limit` shortens it.
No randomness: a limit takes the first images, which are in random order (val5k: shuffled with seed 0).
"""

import argparse
import json
import math
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from undrift.images import Domain, FileDomain
from undrift_bench import data, zoo


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    network: str
    domain: str
    images: int
    skipped: int
    accuracy: float
    margin: float  # half of the 95 % interval
    claimed: float
    seconds: float


def measure(name: str, network: nn.Module, domain: Domain, claimed: float, device: str) -> Row:
    """Return the network's top-1 accuracy on a domain, in per cent."""
    network = network.to(device).eval()
    batches = domain.batches(100, device=device) if isinstance(domain, FileDomain) else domain.to(device).batches(500)
    right = seen = 0
    start = time.perf_counter()
    with torch.inference_mode():
        for images, labels in batches:
            right += int((network(images).argmax(1) == labels).sum())
            seen += len(labels)
    share = right / seen
    margin = 1.96 * math.sqrt(share * (1 - share) / seen)
    seconds = time.perf_counter() - start
    return Row(name, domain.name, seen, len(batches.skipped), 100 * share, 100 * margin, claimed, seconds)


def rows(args: argparse.Namespace) -> list[Row]:
    """Measure every network whose files are there."""
    measured: list[Row] = []

    def add(name: str, weights: Path, domain: Domain, claimed: float) -> None:
        domain = domain.select(range(min(args.limit or len(domain), len(domain))))
        measured.append(measure(name, zoo.load(name, weights), domain, claimed, args.device))
        print(measured[-1], flush=True)

    cifar10 = data.cifar10(args.data, preprocess=zoo.preprocess("wrn40_2"))
    add("wrn40_2", args.data / "cifar10" / "wrn40_2.safetensors", cifar10, 93.5)
    cifar100 = data.cifar100(args.data, preprocess=zoo.preprocess("resnext29"))
    add("resnext29", args.data / "cifar100" / "resnext29.safetensors", cifar100, 73.0)
    if args.resnet50:
        add("resnet50_v1", args.resnet50, data.imagenet(args.data), 74.7)
    else:
        print("resnet50_v1: not measured; write its weights with get_resnet50 and name them with --resnet50")
    return measured


def markdown(measured: list[Row]) -> str:
    """Return the table as Markdown."""
    lines = ["| network | domain | images | accuracy % | claimed % | seconds |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {row.network} | {row.domain} | {row.images:,} | {row.accuracy:.2f} ± {row.margin:.2f} | {row.claimed} "
        f"| {row.seconds:.0f} |"
        for row in measured
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print and write zoo.json and zoo.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with cifar10, cifar100, imagenet")
    parser.add_argument("--out", type=Path, required=True, help="folder for zoo.json and zoo.md")
    parser.add_argument("--resnet50", type=Path, help="resnet50_imagenet.safetensors, as get_resnet50 writes it")
    parser.add_argument("--limit", type=int, help="images of each domain")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="CPU threads")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    measured = rows(args)
    hardware = torch.cuda.get_device_name() if args.device.startswith("cuda") else platform.machine()
    report = {"torch": torch.__version__, "device": args.device, "hardware": hardware, "limit": args.limit}
    args.out.mkdir(parents=True, exist_ok=True)
    content = json.dumps({**report, "rows": [asdict(row) for row in measured]}, indent=2)
    (args.out / "zoo.json").write_text(content + "\n", encoding="utf-8")
    (args.out / "zoo.md").write_text(markdown(measured), encoding="utf-8")
    print(markdown(measured), end="")


if __name__ == "__main__":
    main()
