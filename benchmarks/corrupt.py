"""The fifteen corruptions: as strong as the published ones, independent of the batch, and fast.

Claims, severity 5: the mean squared error against clean on the first 2,000 CIFAR-10 test images is within 5 % of the
check value (10 % for glass, snow and frost, which are random in large pieces); a batch equals its halves bit for bit;
10,000 × 15 images of 32×32 take at most 45 s on two cores and 20 s on an H200, and 5,000 × 15 of 224×224 at most 180 s
on 16 cores and an H200.

    python benchmarks/corrupt.py --threads 2                                  # this machine
    PYTHONPATH=src python benchmarks/corrupt.py --device cuda --out out/gpu   # without installing
    python benchmarks/corrupt.py --sheet photo.png                            # docs/explanation/corruptions.png

Seed 0. Writes corrupt.json and corrupt.md to --out, and the tables into docs/explanation/corruptions.md with --docs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import undrift
from undrift._errors import DataError, UndriftError
from undrift.images import Preprocess
from undrift.images.corrupt import CORRUPTIONS, contact_sheet, corrupt
from undrift_bench import data

CHECKED = (
    *(0.0093, 0.0087, 0.0219, 0.0031, 0.0137, 0.0086, 0.0103, 0.0485, 0.0381, 0.0348, 0.0550, 0.0318, 0.0079),
    *(0.0032, 0.0019),
)
LOOSE = ("glass_blur", "snow", "frost")
BARS = {("cpu", 32): 45.0, ("cuda", 32): 20.0, ("cuda", 224): 180.0}
Row = dict[str, Any]


def main() -> None:
    """Measure, print, write."""
    options = parse()
    torch.set_num_threads(options.threads)
    if options.sheet:
        print(contact_sheet(read_square(options.sheet), "docs/explanation/corruptions.png", frost=options.frost))
        return
    device = torch.device(options.device)
    clean = cifar(options.data)
    report: Row = {"device": device.type, "machine": machine(device), "seed": 0, "severity": 5}
    report["errors"] = None if clean is None else errors(clean[:2000].to(device), options.frost)
    base = synthetic(10_000) if clean is None else clean
    report["seconds"] = {}
    for side, count in ((32, options.count32), (224, options.count224)):
        if count:
            rows = seconds(pictures(base, side, count).to(device), options.frost)
            report["seconds"][str(side)] = summary(rows, count, BARS.get((device.type, side)))
    write(report, options.out, options.docs)


def parse() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of the CPU")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of CIFAR-10; errors need it")
    parser.add_argument(
        "--frost", type=Path, help="folder with frost1.png … frost5.jpg; else the wheel imagecorruptions"
    )
    parser.add_argument("--count32", type=int, default=10_000, help="images of 32×32 to time; 0: none")
    parser.add_argument("--count224", type=int, help="images of 224×224 to time; usual: 5,000 on a GPU, else 200")
    parser.add_argument("--out", type=Path, default=Path("out/corrupt"))
    parser.add_argument("--docs", type=Path, help="a page whose tables, between its markers, are replaced")
    parser.add_argument("--sheet", type=Path, help="only draw docs/explanation/corruptions.png from this picture")
    options = parser.parse_args()
    if options.count224 is None:
        options.count224 = 200 if options.device == "cpu" else 5_000
    return options


def machine(device: torch.device) -> str:
    """Return what the figures were measured on, in words."""
    processor = f"{torch.get_num_threads()} threads of {platform.processor() or platform.machine()}"
    gpu = f"{torch.cuda.get_device_name(device)}, " if device.type == "cuda" else ""
    return f"{gpu}{processor}, torch {torch.__version__}"


def cifar(root: Path) -> Tensor | None:
    """Return the CIFAR-10 test images, or None where there are none."""
    try:
        return data.cifar10(root).images
    except DataError as error:
        print(f"No CIFAR-10 test images, so no errors, and timing on made-up pictures: {error}")
        return None


def synthetic(count: int) -> Tensor:
    """Return made-up 32×32 pictures: blobs and grain."""
    generator = torch.Generator().manual_seed(0)
    blobs = F.interpolate(torch.rand(count, 3, 6, 6, generator=generator), size=(32, 32), mode="bicubic")
    return ((blobs + torch.randn(count, 3, 32, 32, generator=generator) * 0.05).clamp(0, 1) * 255).byte()


def pictures(base: Tensor, side: int, count: int) -> Tensor:
    """Return `count` pictures of the side wanted; large ones are enlarged small ones with grain, so JPEG has work."""
    base = base[torch.arange(count) % len(base)]
    if side == 32:
        return base
    large = torch.empty(count, 3, side, side, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    grain = torch.randn(3, side, side, generator=generator) * 6
    for start in range(0, count, 100):
        smooth = F.interpolate(base[start : start + 100].float(), size=(side, side), mode="bilinear")
        large[start : start + 100] = (smooth + grain).clamp(0, 255).byte()
    return large


def read_square(path: Path) -> Tensor:
    """Return the middle of a picture as 3×224×224."""
    framed = undrift.images.domain(path, preprocess=Preprocess(resize=224, crop=224, interpolation="bicubic"))
    return framed.hold(workers=0).images[0]


def errors(clean: Tensor, frost: Path | None) -> dict[str, Row]:
    """Return each corruption's mean squared error at severity 5, and whether a batch equals its parts."""
    rows: dict[str, Row] = {}
    for name, check in zip(CORRUPTIONS, CHECKED, strict=True):
        row: Row = {"check": check, "allowed": 0.10 if name in LOOSE else 0.05}
        try:
            out = corrupt(clean, name, 5, frost=frost)
            parts = [corrupt(clean[a:b], name, 5, first=a, frost=frost) for a, b in ((0, 1), (1, 700), (700, 2000))]
        except UndriftError as error:
            row["not_run"] = str(error)
        else:
            row["measured"] = ((out.float() - clean.float()) / 255).square().mean().item()
            row["off"] = row["measured"] / check - 1
            row["batch_is_its_parts"] = torch.equal(out, torch.cat(parts))
            row["held"] = abs(row["off"]) <= row["allowed"] and row["batch_is_its_parts"]
        rows[name] = row
        print(name, row, flush=True)
    return rows


def wait(images: Tensor) -> None:
    """Wait until a GPU has done what was asked of it."""
    if images.is_cuda:
        torch.cuda.synchronize(images.device)


def seconds(images: Tensor, frost: Path | None) -> dict[str, float | None]:
    """Return each corruption's time at severity 5; None where it could not run."""
    rows: dict[str, float | None] = {}
    for name in CORRUPTIONS:
        try:
            corrupt(images[:2], name, 5, frost=frost)  # reads frost pictures, loads kernels
            wait(images)
            start = time.perf_counter()
            corrupt(images, name, 5, frost=frost)
            wait(images)
            rows[name] = time.perf_counter() - start
        except UndriftError:
            rows[name] = None
        print(f"{images.shape[-1]} {name} {rows[name]}", flush=True)
    return rows


def summary(rows: dict[str, float | None], count: int, bar: float | None) -> Row:
    """Return the times with their sum and, at the full number of images, whether the bar was held."""
    total = sum(row for row in rows.values() if row is not None)
    full = count == (10_000 if bar in (45.0, 20.0) else 5_000)
    held = None if bar is None or not full else total <= bar and None not in rows.values()
    return {"images": count, "each": rows, "total": total, "bar": bar if full else None, "held": held}


def tables(report: Row) -> str:
    """Return the report as Markdown."""
    times = report["seconds"]
    heads = [f"s for {part['images']:,} of {side}×{side}" for side, part in times.items()]
    lines = [f"Measured on {report['machine']}; severity 5, seed 0.", ""]
    head = ["corruption", "MSE", "check value", "off", "allowed", "batch = parts", *heads]
    lines += ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name in CORRUPTIONS:
        row = (report["errors"] or {}).get(name, {"not_run": "no data"})
        if "not_run" in row:
            cells = ["not run", *[""] * 4]
        else:
            miss = "" if row["held"] else " **missed**"
            parts = "yes" if row["batch_is_its_parts"] else "**no**"
            cells = [f"{row['measured']:.5f}", f"{row['check']:.4f}", f"{row['off']:+.1%}{miss}"]
            cells += [f"{row['allowed']:.0%}", parts]
        for part in times.values():
            cells.append("not run" if part["each"][name] is None else f"{part['each'][name]:.2f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    ends = []
    for part in times.values():
        bar = "" if part["bar"] is None else f" (bar {part['bar']:.0f}{'' if part['held'] else ', **missed**'})"
        ends.append(f"**{part['total']:.1f}**{bar}")
    lines.append("| **all** | | | | | | " + " | ".join(ends) + " |")
    return "\n".join(lines) + "\n"


def write(report: Row, out: Path, docs: Path | None) -> None:
    """Write the report as JSON and Markdown, and into a page between its markers."""
    out.mkdir(parents=True, exist_ok=True)
    text = tables(report)
    (out / "corrupt.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (out / "corrupt.md").write_text(text, encoding="utf-8")
    print(text)
    if docs:
        begin, end = f"<!-- written by benchmarks/corrupt.py, {report['device']} -->", "<!-- end -->"
        page = docs.read_text(encoding="utf-8")
        docs.write_text(
            re.sub(f"{begin}.*?{end}", lambda _: f"{begin}\n{text}{end}", page, flags=re.S), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
