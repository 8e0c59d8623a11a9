"""Claim: a pack in three levels per weight is a twentieth of the network and as accurate as the weights themselves.

    cifar   WRN-40-2 adapted by `undrift` over epochs to one development corruption and two of the fifteen (severity 5);
            each exact pack stored again in every way, and the accuracy of each on other images of its corruption.
    pacs    the same for the exact packs of a folder: ResNet-50, target accuracy (transductive, as PACS is scored).
    sizes   ResNet-50 and WRN-28-10 with random shifts: bytes of a pack. Random shifts compress worst, as no level is
            rarer than chance makes it.

The control is the exact pack; beside each way, the relative error of the shifts, ‖restored − shift‖ / ‖shift‖.

Predicted: ternary and more within 0.3 points of exact; signs lose half a point, ranks several. ResNet-50 below 5 MB and
WRN-28-10 below 7 MB in ternary; packs without a mean below 0.23 MB.

Command:   python benchmarks/compression.py cifar --data ../shared/data/cifar10
           python benchmarks/compression.py pacs --data ../shared/data --packs FOLDER --cache FOLDER --fast
           python benchmarks/compression.py sizes
Hardware:  `cifar` and `sizes`: two CPU cores, 10 minutes. `pacs`: a GPU, and the packs and sources of
           `python benchmarks/routing.py pacs --mean exact`.
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
from torch import Tensor, nn

import undrift
from undrift.images.corrupt import corrupt
from undrift.packs.mean import mean_shifts, trained_weights
from undrift.posterior.perturbed import Perturbed
from undrift.system.atomic import write_text
from undrift_bench import zoo
from undrift_bench.bench.harness.measure import machine
from undrift_bench.bench.harness.quickly import quickly
from undrift_bench.bench.harness.request import Request
from undrift_bench.bench.offline.sets import SETS
from undrift_bench.bench.offline.sources import Images, Sources, setup
from undrift_bench.bench.offline.views import CentreView
from undrift_bench.data import cifar10

WAYS = ("exact", "4-bit", "3-bit", "2-bit", "ternary", "signs", "rank-32", "rank-8")
SIZED = ("4-bit", "3-bit", "2-bit", "ternary", "signs")  # singular values of all weights take minutes
CORRUPTIONS = ("gaussian_blur", "gaussian_noise", "contrast")  # the first is for development
LEARN_FROM = 5_000  # the first CIFAR-10 image that packs are learned on
SIZE = 250


def accuracy(net: nn.Module, file: Path, images: Tensor, labels: Tensor) -> float:
    """Return the accuracy of one pack, asked for all images, as packs answer."""
    packs = undrift.packs(net, file)
    with packs.using(packs.names[1]):
        answers = [packs.predict(part, generator=0).label.cpu() for part in images.split(SIZE)]
    return float((torch.cat(answers) == labels.cpu()).float().mean())


def lost(model: Perturbed, way: str) -> float:
    """Return the relative error of all compressed shifts together."""
    weights, wrong, whole = trained_weights(model), 0.0, 0.0
    for name, shift in mean_shifts(model, way).items():
        source, adapted = (weight.detach().float().cpu() for weight in weights[name])
        wrong += float((shift.dense() - (adapted - source)).square().sum())
        whole += float((adapted - source).square().sum())
    return (wrong / whole) ** 0.5 if whole else 0.0


def stored_again(net: nn.Module, exact: Path, folder: Path, way: str) -> tuple[Path, dict[str, float]]:
    """Store an exact pack in another way; return where, its bytes and what was lost."""
    place = folder / f"{exact.stem}-{way}.safetensors"
    model = undrift.load(net, exact)
    size = undrift.save(model, place, mean=way)
    found = {"bytes": size, "shift error": lost(model, way)}
    model.remove()
    return place, found


def every_way(net: nn.Module, exact: Path, images: Tensor, labels: Tensor) -> dict[str, dict[str, float]]:
    """Return bytes, error of the shifts and accuracy of a pack stored in every way."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for way in WAYS:
            place, one = stored_again(net, exact, Path(folder), way)
            found[way] = one | {"accuracy": accuracy(net, place, images, labels)}
            print(exact.stem, way, found[way], flush=True)
    return found


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
    for name in CORRUPTIONS:
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
            "ways": every_way(net, exact, held, labels),
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
            tasks[task.name] = {"ways": every_way(net, exact, images, target.labels)}
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
                ways = SIZED if kind == "mean" else ("ternary",)
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
    """Return bytes, error of shifts and accuracy of each way, on the mean of the tasks."""
    tasks = list(part["tasks"].values())
    keys = ("bytes", "shift error", "accuracy")
    return {way: {key: statistics.fmean(t["ways"][way][key] for t in tasks) for key in keys} for way in WAYS}


def page(record: Mapping[str, Any]) -> str:
    """Return the tables for docs/explanation/packs.md."""
    lines = []
    for name in ("pacs", "cifar"):
        if not record.get(name, {}).get("tasks"):
            continue
        part = record[name]
        tasks, whole = part["tasks"], means(part)
        where = f"{part['hardware']}, {part['date']}"
        lines += [
            f"{part['network']}, {len(tasks)} tasks, accuracy % on the target ({where}):",
            "",
            f"| mean as | MB | of the network | error of the shift | {' | '.join(tasks)} | mean | beside exact |",
            "|---|---:|---:|---:|" + "---:|" * (len(tasks) + 2),
        ]
        for way, one in whole.items():
            own = [f"{100 * task['ways'][way]['accuracy']:.1f}" for task in tasks.values()]
            beside = 100 * (one["accuracy"] - whole["exact"]["accuracy"])
            share = f"{100 * one['bytes'] / part['network bytes']:.1f} %"
            cells = [way, f"{one['bytes'] / 1e6:.2f}", share, f"{one['shift error']:.2f}", *own]
            cells += [f"{100 * one['accuracy']:.2f}", "" if way == "exact" else f"{beside:+.2f}".replace("-", "−")]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    if record.get("sizes"):
        networks = record["sizes"]["networks"]
        lines += ["Bytes of a pack, MB; the shifts are random, which compress worst:", ""]
        lines += [f"| | network | {' | '.join(SIZED)} | norm layers alone |", "|---|" + "---:|" * (len(SIZED) + 2)]
        for title, one in networks.items():
            cells = [title, f"{one['network bytes'] / 1e6:.0f}", *(f"{one['mean'][way] / 1e6:.2f}" for way in SIZED)]
            lines.append("| " + " | ".join([*cells, f"{one['norm layers alone']['ternary'] / 1e6:.3f}"]) + " |")
    return "\n".join(lines)


def curve(record: Mapping[str, Any], place: Path) -> None:
    """Draw accuracy against bytes."""
    from matplotlib.figure import Figure

    parts = [record[name] for name in ("pacs", "cifar") if record.get(name, {}).get("tasks")]
    figure = Figure(figsize=(5.2 * len(parts), 3.6), layout="constrained")
    for number, part in enumerate(parts, 1):
        axes, whole = figure.add_subplot(1, len(parts), number), means(part)
        for family, colour in (("rank", "C1"), ("", "C0")):
            ways = [way for way in WAYS if way.startswith("rank") == (family == "rank")]
            points = [(whole[way]["bytes"] / 1e6, 100 * whole[way]["accuracy"]) for way in ways]
            axes.plot(*zip(*points, strict=True), "o-", color=colour)
            for way, point in zip(ways, points, strict=True):
                axes.annotate(way, point, xytext=(4, -10), textcoords="offset points", fontsize=8)
        axes.set(xscale="log", xlabel="pack, MB", ylabel="accuracy %, mean", title=f"{part['network']}")
        axes.margins(0.12)
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
