"""Claim: one and a half bits per weight answer as the weights themselves, in a twentieth of the network.

    cifar   WRN-40-2 adapted by `undrift` over epochs to one development corruption and two of the fifteen (severity 5);
            each exact pack stored again in every way, and the answers of each to other images of its corruption.
    pacs    the same for the exact packs of a folder: ResNet-50, target accuracy (transductive, as PACS is scored).
    sizes   ResNet-50 and WRN-28-10 with random shifts: bytes of a pack. Random shifts compress worst, as no level is
            rarer than chance makes it.

The control is the exact pack. Beside each way: KL(its answers ‖ the exact pack's) in millionths of a nat, a finer
measure than accuracy, with the same noise; and the relative error of the shifts, ‖restored − shift‖ / ‖shift‖. A way
that ends in "+statistics" has norm statistics taken again under the compressed weights, from 1,000 of the images.

Rule, written down before PACS was run: "auto" is the fewest of 0.5, 1 and 1.5 bits with which PACS's mean is within 0.3
points of exact and no task loses more than 1.0; 1.5 bits, which fit the bars whatever the shift, if none is or until
then. Statistics are taken again if that gains on the mean of PACS, beside exact packs with statistics taken again.

Predicted for PACS: 1 bit and more within 0.3 points of exact; 0.5 bits as good as ternary. ResNet-50 below 5 MB and
WRN-28-10 below 7 MB with 1.5 bits; packs without a mean below 0.23 MB.

Command:   python benchmarks/compression.py cifar --data ../shared/data/cifar10
           python benchmarks/compression.py pacs --data ../shared/data --packs FOLDER --cache FOLDER --fast
           python benchmarks/compression.py sizes
Hardware:  `cifar` and `sizes`: two CPU cores, 30 minutes. `pacs`: a GPU, and the packs and sources of
           `python benchmarks/routing.py pacs --mean exact`; or `python benchmarks/pacs.py`, which does it all.
Seeds:     0.
Output:    compression.json and compression.png under --results, and a table on the terminal.
"""

import argparse
import copy
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import undrift
from undrift.images.corrupt import corrupt
from undrift.packs.compression import trained_weights
from undrift.system.atomic import write_text
from undrift_bench import zoo
from undrift_bench.bench.harness.measure import machine
from undrift_bench.bench.harness.quickly import quickly
from undrift_bench.bench.harness.request import Request
from undrift_bench.bench.offline.sets import SETS
from undrift_bench.bench.offline.sources import Images, Sources, setup
from undrift_bench.bench.offline.storage import stored_ways
from undrift_bench.bench.offline.views import CentreView
from undrift_bench.data import cifar10

SIZED = ("2-bit", "1.5-bit", "1-bit", "ternary", "signs")  # singular values of all weights take minutes
CORRUPTIONS = ("gaussian_blur", "gaussian_noise", "contrast")  # the first is for development
FEW: dict[str, Any] = {"samples": 2, "views": ()}  # cifar: answers for a CPU
LEARN_FROM = 5_000  # the first CIFAR-10 image that packs are learned on
SIZE = 250


def said(exact: Path, ways: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Print what was found, and return it."""
    for way, found in ways.items():
        print(exact.stem, way, {name: float(f"{value:.4g}") for name, value in found.items()}, flush=True)
    return ways


def cifar(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Adapt to three corruptions and compress what was learned; the record so far after each."""
    device = Request(device=asked.device).place
    clean = cifar10(asked.data)
    assert clean.labels is not None
    packs = (asked.cache or Path(tempfile.mkdtemp())) / "compression"
    packs.mkdir(parents=True, exist_ok=True)
    net = zoo.load("wrn40_2", asked.data / "wrn40_2.safetensors").to(device).eval()
    labels, tasks = clean.labels[: asked.images], dict[str, Any]()
    about = {"images": asked.images, "learned on": asked.learn, "epochs": asked.epochs}
    for name in asked.corruptions:
        learn, held = (
            corrupt(clean.images[first : first + count], name, 5).to(device).float() / 255
            for first, count in ((LEARN_FROM, asked.learn), (0, asked.images))
        )
        exact = packs / f"{name}-l{asked.learn}-e{asked.epochs}.safetensors"
        if not exact.is_file():
            begun = time.perf_counter()
            torch.manual_seed(0)
            generator = torch.Generator().manual_seed(0)
            model = undrift.adapt(
                copy.deepcopy(net), learn, epochs=asked.epochs, generator=generator, progress=False
            ).model
            assert model is not None
            undrift.save(model, exact, mean="exact")
            print(f"{name}: adapted in {time.perf_counter() - begun:.0f} s", flush=True)
        source = torch.cat([net(part).argmax(1).cpu() for part in held.split(SIZE)])
        tasks[name] = {
            "source": float((source == labels).float().mean()),
            "ways": said(exact, stored_ways(net, exact, held, labels, **FEW)),
        }
        yield machine(device) | about | {"network": "WRN-40-2", "network bytes": nbytes(net), "tasks": tasks}


def pacs(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Compress the exact packs of a folder, SOURCE-TARGET-….safetensors."""
    weights = {} if asked.resnet50 is None else {"resnet50": asked.resnet50}
    request = Request(
        data=asked.data, cache=asked.cache, fast=asked.fast, device=asked.device, images=None, weights=weights
    )
    made_of = setup(SETS["pacs"], request)
    domains = Images(made_of, request)
    sources = Sources(made_of, domains, request)
    centre = CentreView.of(made_of.preprocess, request.fast)
    tasks = dict[str, Any]()
    with quickly(request.place, request.fast):
        for task in made_of.dataset.tasks:
            exact = next(iter(sorted(asked.packs.glob(f"{task.source}-{task.target}*-s0.safetensors"))), None)
            if exact is None:
                print(f"no pack of {task.name}", flush=True)
                continue
            net = copy.deepcopy(sources.network(task.source, 0)).to(request.place)
            if request.fast:
                net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            target = domains(task.target)
            assert target.labels is not None
            images = torch.cat([centre(part) for part in target.images.split(SIZE)])
            tasks[task.name] = {"ways": said(exact, stored_ways(net, exact, images, target.labels))}
            yield machine(request.place) | {"network": "ResNet-50", "network bytes": nbytes(net), "tasks": tasks}


def sizes(_asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Return the bytes of packs of two networks, of random shifts and of norm layers alone."""
    device, found = torch.device("cpu"), {}
    torch.manual_seed(0)
    for title, name, side in (("ResNet-50", "resnet50", 64), ("WRN-28-10", "wrn28_10", 32)):
        net = zoo.build(name).eval()
        one: dict[str, Any] = {"network bytes": nbytes(net)}
        with tempfile.TemporaryDirectory() as folder:
            for kind, method in (("mean", "undrift"), ("norm layers alone", "undrift-light")):
                images = torch.rand(16, 3, side, side)
                model = undrift.adapt(net, images, method=method, epochs=1, batch_size=16, progress=False).model
                assert model is not None
                with torch.no_grad():
                    for _, adapted in trained_weights(model).values():
                        adapted.add_(1e-3 * torch.randn_like(adapted))
                ways = SIZED if kind == "mean" else ("1.5-bit",)
                place = Path(folder) / "pack.safetensors"
                one[kind] = {way: undrift.save(model, place, mean=way) for way in ways}
                model.remove()
                print(title, kind, one[kind], flush=True)
        found[title] = one
    yield machine(device) | {"networks": found}


def nbytes(net: nn.Module) -> int:
    """Return the bytes of a network's state."""
    return sum(tensor.nbytes for tensor in net.state_dict().values())


# The table and the curve ----------------------------------------------------------------------------------------


def means(part: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return what was found of each way, on the mean of the tasks; of ways that all tasks have."""
    tasks = [task["ways"] for task in part["tasks"].values()]
    common = [way for way in tasks[0] if all(way in ways for ways in tasks)]
    return {way: {key: statistics.fmean(t[way][key] for t in tasks) for key in tasks[0][way]} for way in common}


def page(record: Mapping[str, Any]) -> str:
    """Return the tables for docs/explanation/packs.md."""
    lines = []
    for name in ("pacs", "cifar"):
        if not record.get(name, {}).get("tasks"):
            continue
        part = record[name]
        tasks, whole = part["tasks"], means(part)
        about = f"{part['hardware']}, {part['date']}"
        about += f"; {part['images']} images of each" if "images" in part else ""
        lines += [
            f"{part['network']}, {len(tasks)} tasks, accuracy % on the target ({about}):",
            "",
            f"| mean as | MB | share | error of the shift | KL, 10⁻⁶ | {' | '.join(tasks)} | mean | beside exact |",
            "|---|---:|---:|---:|---:|" + "---:|" * (len(tasks) + 2),
        ]
        for way, one in whole.items():
            own = [f"{100 * task['ways'][way]['accuracy']:.1f}" for task in tasks.values()]
            beside = 100 * (one["accuracy"] - whole["exact"]["accuracy"])
            share = f"{100 * one['bytes'] / part['network bytes']:.1f} %"
            cells = [way, f"{one['bytes'] / 1e6:.2f}", share, f"{one['shift error']:.2f}", f"{1e6 * one['kl']:,.0f}"]
            cells += [*own, f"{100 * one['accuracy']:.2f}"]
            cells += ["" if way == "exact" else f"{beside:+.2f}".replace("-", "−")]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    if record.get("sizes"):
        networks = record["sizes"]["networks"]
        sized = list(next(iter(networks.values()))["mean"])
        lines += ["Bytes of a pack, MB; the shifts are random, which compress worst:", ""]
        lines += [f"| | network | {' | '.join(sized)} | norm layers alone |", "|---|" + "---:|" * (len(sized) + 2)]
        for title, one in networks.items():
            cells = [title, f"{one['network bytes'] / 1e6:.0f}", *(f"{one['mean'][way] / 1e6:.2f}" for way in sized)]
            alone = next(iter(one["norm layers alone"].values()))
            lines.append("| " + " | ".join([*cells, f"{alone / 1e6:.3f}"]) + " |")
    return "\n".join(lines)


def curve(record: Mapping[str, Any], place: Path) -> None:
    """Draw KL against bytes."""
    from matplotlib.figure import Figure

    parts = [record[name] for name in ("pacs", "cifar") if record.get(name, {}).get("tasks")]
    figure = Figure(figsize=(5.2 * len(parts), 3.6), layout="constrained")
    for number, part in enumerate(parts, 1):
        axes, whole = figure.add_subplot(1, len(parts), number), means(part)
        for way, one in whole.items():
            if way != "exact":
                axes.plot(one["bytes"] / 1e6, 1e6 * one["kl"], "o", color="C1" if "statistics" in way else "C0")
                axes.annotate(
                    way, (one["bytes"] / 1e6, 1e6 * one["kl"]), (4, -10), textcoords="offset points", fontsize=8
                )
        axes.set(xscale="log", yscale="log", xlabel="pack, MB", ylabel="KL from the exact pack, 10⁻⁶")
        axes.set_title(part["network"])
        axes.margins(0.15)
    figure.savefig(place, dpi=130)


def main() -> None:
    """Run one part, and write it beside the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("cifar", "pacs", "sizes"))
    parser.add_argument("--data", type=Path, default=Path())
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--cache", type=Path, help="for packs, decoded images and source networks")
    parser.add_argument("--packs", type=Path, help="pacs: a folder of exact packs")
    parser.add_argument("--resnet50", type=Path, help="pacs: ImageNet's weights, where sources are to be trained")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--fast", action="store_true", help="pacs: channels-last and bfloat16")
    parser.add_argument("--images", type=int, default=1_000, help="cifar: that packs are scored on")
    parser.add_argument("--learn", type=int, default=1_000, help="cifar: that packs are learned on")
    parser.add_argument("--corruptions", nargs="+", default=CORRUPTIONS, help="cifar")
    parser.add_argument("--epochs", type=int, default=3, help="cifar")
    asked = parser.parse_args()
    place = asked.results / "compression.json"
    record: dict[str, Any] = json.loads(place.read_text("utf-8")) if place.is_file() else {}
    for one in {"cifar": cifar, "pacs": pacs, "sizes": sizes}[asked.part](asked):
        record[asked.part] = one
        write_text(place, json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    if asked.part != "sizes":
        curve(record, asked.results / "compression.png")
    print(page(record))


if __name__ == "__main__":
    main()
