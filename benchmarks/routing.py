"""Claim: packs on one network, chosen image by image, gain every domain; changing them takes milliseconds.

    cifar   CIFAR-10-C, severity 5: a pack for each of the fifteen corruptions, learned without labels on images 5,000
            to 10,000 (--learn of them, after --images); then the first 5,000 under all fifteen, mixed image by image.
            Beside them: the source, an oracle, and streams of norm-stats and ROID on the same images in that order.
    times   ResNet-50: switching a pack without and with a mean, the evidence pass, a mixed batch.

Domains of PACS are routed by pacs.py.

Predicted: cifar, WRN-40-2, undrift packs: below ROID's 33.9 % of mixed streams. times, H200: 2 ms without a mean, 15 ms
with one.

Command:   python benchmarks/routing.py cifar --data ../shared/data/cifar10 [--network wrn28_10 --weights FILE]
           python benchmarks/routing.py times
           What is under --results/routing is not run again, and several processes may learn the packs.
Hardware:  a GPU; `times`, and `cifar --method norm-stats --images 60 --learn 200 --fast`, run on a CPU core too.
Seeds:     0.
Output:    routing/cifar/*.json and routing-times-DEVICE.json under --results.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import undrift
from undrift.images.corrupt import CORRUPTIONS
from undrift.packs.moments import watching
from undrift.system.atomic import write_text
from undrift.system.lock import held
from undrift_bench import zoo
from undrift_bench.bench.harness.measure import laps, machine
from undrift_bench.bench.harness.quickly import quickly
from undrift_bench.bench.harness.request import Request
from undrift_bench.bench.online.corrupted import Corrupted
from undrift_bench.data import cifar10


@contextmanager
def mine(place: Path) -> Iterator[bool]:
    """Say whether a result is missing and no other process is making it."""
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.is_file():
        yield False
        return
    with held(place.with_suffix(".lock")) as free:
        yield free and not place.is_file()


def write(place: Path, record: dict[str, Any]) -> None:
    """Write a result."""
    write_text(place, json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    print(place.stem, json.dumps(record.get("short", {})), flush=True)


# CIFAR-10-C -----------------------------------------------------------------------------------------------------


def cifar(asked: argparse.Namespace) -> None:
    """Learn fifteen packs, and answer the mixture of their corruptions."""
    device = Request(device=asked.device).place
    weights = asked.weights or asked.data / "wrn40_2.safetensors"
    made = Corrupted(cifar10(asked.data), device, asked.cache, asked.frost)
    labels = made.clean.labels
    assert labels is not None
    first, last = asked.images, asked.images + asked.learn
    kind = f"{asked.network}-{asked.method}-l{asked.learn}-after-{first}"
    packs_at = (asked.cache or asked.results / "routing") / "packs" / "cifar"
    packs_at.mkdir(parents=True, exist_ok=True)

    def network() -> nn.Module:
        net = zoo.load(asked.network, weights).to(device).eval()
        return net.to(memory_format=torch.channels_last) if asked.fast else net  # type: ignore[call-overload]

    for name in CORRUPTIONS:
        place = packs_at / f"{kind}-{name}.safetensors"
        with mine(place) as missing:
            if not missing:
                continue
            images = made.held([(name, 5)], last)[0][first:].float().to(device) / 255
            torch.manual_seed(0)
            model = undrift.adapt(
                network(),
                images,
                method=asked.method,
                epochs=asked.epochs,
                generator=torch.Generator().manual_seed(0),
                progress=False,
            ).model
            assert model is not None
            undrift.save(model, place, mean=asked.mean, name=name)
            print(f"{place.stem}: {place.stat().st_size:,} bytes", flush=True)
    place = asked.results / "routing" / "cifar" / f"{kind}-{asked.mean}-n{first}.json"
    files = [packs_at / f"{kind}-{name}.safetensors" for name in CORRUPTIONS]
    if not all(file.is_file() for file in files):
        return
    with mine(place) as missing:
        if not missing:
            return
        images = torch.cat([made.held([(name, 5)], first)[0] for name in CORRUPTIONS])
        truth = labels[:first].repeat(len(CORRUPTIONS))
        own = torch.arange(len(CORRUPTIONS)).repeat_interleave(first)
        order = torch.randperm(len(truth), generator=torch.Generator().manual_seed(0))
        images, truth, own = images[order], truth[order], own[order]

        def batch(rows: Tensor) -> Tensor:
            return images[rows].to(device).float() / 255

        packs = undrift.packs(network(), *files)
        every = torch.arange(len(truth))
        routed = [packs.predict(batch(rows), generator=0).cpu() for rows in every.split(200)]
        label, choice = torch.cat([p.label for p in routed]), torch.cat([p.choice for p in routed])
        answers = {"packs, routed": label}
        told = torch.empty_like(truth)
        for number, name in enumerate(CORRUPTIONS):
            rows = (own == number).nonzero()[:, 0]
            with packs.using(name):
                told[rows] = torch.cat([packs.predict(batch(r), generator=0).label.cpu() for r in rows.split(200)])
        answers["packs, told which"] = told
        with packs.using("source"):
            answers["source"] = torch.cat([packs.predict(batch(rows)).label.cpu() for rows in every.split(200)])
        for method in asked.rivals:
            stream = undrift.stream(network(), (batch(rows) for rows in every.split(200)), method=method)
            answers[method] = torch.cat([p.label.cpu() for p in stream])
            stream.remove()
        error = {name: 100 * float((found != truth).float().mean()) for name, found in answers.items()}
        record = machine(device) | {"network": asked.network, "method": asked.method, "images": first}
        record |= {"learned on": asked.learn, "epochs": asked.epochs, "mean": asked.mean, "fast": asked.fast}
        record["error"] = error
        record["own pack"] = float((choice - 1 == own).float().mean())
        record["unknown"], record["bytes"] = packs.unknown, sum(file.stat().st_size for file in files)
        record["by corruption"] = {
            name: {way: 100 * float((found != truth)[own == i].float().mean()) for way, found in answers.items()}
            for i, name in enumerate(CORRUPTIONS)
        }
        write(place, record | {"short": {name: round(value, 1) for name, value in error.items()}})


# Times ----------------------------------------------------------------------------------------------------------


def times(asked: argparse.Namespace) -> None:
    """Measure switching, evidence and mixed batches with ResNet-50."""
    device = Request(device=asked.device).place
    place = asked.results / f"routing-times-{device.type}.json"
    torch.manual_seed(0)
    net = zoo.build("resnet50", 1000).to(device).eval()
    side, size = (224, 64) if device.type == "cuda" else (64, 8)
    images = torch.rand(size, 3, side, side, device=device)
    with tempfile.TemporaryDirectory() as folder:
        for name, train in (("norm a", ()), ("norm b", ()), ("mean a", ("*",)), ("mean b", ("*",))):
            model = undrift.perturb(net, train=train, test_samples=1)
            with torch.no_grad():
                for held_weights in model.trained:
                    for tensor in held_weights.parameters():
                        tensor.add_(1e-3 * torch.randn_like(tensor))
            history = undrift.adapt(
                model, torch.rand_like(images) / (1 + len(name)), epochs=1, progress=False, batch_size=size
            )
            assert history.model is not None
            undrift.save(model, f"{folder}/{name}.safetensors")
            model.remove()
        packs = undrift.packs(net, folder)
    found: dict[str, float] = {}

    def median(what: str, call: Callable[[], object], count: int = 20) -> None:
        laps(call, device, 3)
        found[what] = 1e3 * statistics.median(laps(call, device, count))

    def switch(name: str) -> None:
        with packs.using(name):
            pass

    with torch.no_grad():
        median("source pass", lambda: net(images))

        def evidence() -> None:
            with watching(net) as watch:
                net(images)
                moments = watch.moments()
                assert moments is not None
                packs.router.routes(moments)

        median("source pass with evidence of four packs", evidence)
    for name in ("norm a", "mean a"):
        median(f"on and off again, {name.split()[0]}", lambda name=name: switch(name))
    for name in ("norm a", "mean a"):
        with packs.using(name):
            median(f"one pass of a {name.split()[0]} pack", lambda: packs.predict(images, samples=1))
    median("mixed batch", lambda: packs.predict(images, samples=1))
    memory = {"network": sum(t.nbytes for t in net.state_dict().values()), "four packs": packs.nbytes}
    record = machine(device) | {"batch": size, "side": side, "threads": torch.get_num_threads()}
    write_text(place, json.dumps(record | {"milliseconds": found, "bytes": memory}, indent=1) + "\n")
    print(json.dumps(found, indent=1), memory)


def page(folder: Path) -> str:
    """Return the tables of PACS for docs/explanation/routing.md: all seeds there are, and by which router."""
    found = [json.loads(place.read_text("utf-8")) | {"file": place.stem} for place in sorted(folder.glob("*.json"))]
    lines = []
    for router in dict.fromkeys(one.get("router", "evidence alone") for one in found):
        own = [one for one in found if one.get("router", "evidence alone") == router]
        tasks, mixed = [one for one in own if "ways" in one], [one for one in own if "domains" in one]
        where = f"{own[0]['hardware']}, {own[0]['date']}; {1 + max(one['seed'] for one in own)} seed(s)"
        lines += [f"Router: {router} ({where}). Accuracy %, held-out source / target:", ""]
        ways = list(tasks[0]["ways"])
        lines += [f"| task | {' | '.join(ways)} | pack, MB |", "|---|" + "---:|" * (len(ways) + 1)]
        by_task: dict[str, list[Any]] = {}
        for one in tasks:
            by_task.setdefault(one["file"].split(f"-{one['mean']}")[0], []).append(one)
        for task, seeds in by_task.items():
            lines.append(_row(task.replace("_painting", "").replace("-", " → "), ways, seeds))
        lines += [_row("mean", ways, tasks), ""]
        lines += ["Four domains mixed image by image, three packs, mean accuracy % of the domains:", ""]
        lines += ["| source network | routed | oracle | images to the right network, % |", "|---|---:|---:|---|"]
        for one in mixed:
            right = []
            for number, (domain, got) in enumerate(one["domains"].items()):
                right.append(f"{domain.replace('_painting', '')} {100 * got['given to'][number]:.0f}")
            whole = one["mean"] if isinstance(one["mean"], dict) else one["whole"]
            cells = [next(iter(one["domains"])).replace("_painting", "")]
            cells += [f"{100 * whole[way]:.1f}" for way in ("routed", "oracle")]
            lines.append("| " + " | ".join([*cells, ", ".join(right)]) + " |")
        lines.append("")
    return "\n".join(lines).rstrip("\n") or "Not measured yet."


def _row(name: str, ways: list[str], records: list[Any]) -> str:
    def mean(way: str, part: str) -> float:
        return 100 * statistics.fmean(one["ways"][way][part] for one in records)

    cells = [f"{mean(way, 'source'):.1f} / {mean(way, 'target'):.1f}" for way in ways]
    size = statistics.fmean(one["bytes"] for one in records) / 1e6
    return "| " + " | ".join([name, *cells, f"{size:.1f}"]) + " |"


def page_of_cifar(folder: Path) -> str:
    """Return the table of fifteen packs for docs/explanation/routing.md."""
    found = [json.loads(place.read_text("utf-8")) for place in sorted(folder.glob("*.json"))]
    if not found:
        return "Not measured yet."
    ways = list(dict.fromkeys(way for one in found for way in one["error"]))
    lines = [f"| error % | {' | '.join(ways)} | own pack, % | packs, MB |", "|---|" + "---:|" * (len(ways) + 2)]
    for one in found:
        about = f"{one['network']}, `{one['method']}` packs of {one['learned on']:,} images, {one['images']:,} of each "
        about += f"corruption ({one['hardware']}{', bfloat16' * one['fast']}, {one['date']})"
        cells = [f"{one['error'][way]:.1f}" if way in one["error"] else "–" for way in ways]
        cells += [f"{100 * one['own pack']:.0f}", f"{one['bytes'] / 1e6:.1f}"]
        lines.append("| " + " | ".join([about, *cells]) + " |")
    return "\n".join(lines)


def page_of_times(records: list[dict[str, Any]]) -> str:
    """Return the table of times for docs/explanation/packs.md."""
    if not records:
        return "Not measured yet."
    head = [f"{one['hardware']}, batch {one['batch']}, {one['side']} pixels" for one in records]
    lines = [f"| ResNet-50, ms | {' | '.join(head)} |", "|---|" + "---:|" * len(head)]
    for what in records[0]["milliseconds"]:
        lines += [f"| {what} | " + " | ".join(f"{one['milliseconds'][what]:.1f}" for one in records) + " |"]
    return "\n".join(lines)


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("cifar", "times"))
    parser.add_argument("--data", type=Path, default=Path())
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--cache", type=Path, help="for corrupted images and packs")
    parser.add_argument("--network", default="wrn40_2")
    parser.add_argument("--weights", type=Path, help="of --network; default: wrn40_2.safetensors in --data")
    parser.add_argument("--frost", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--method", default="undrift")
    parser.add_argument("--mean", default="auto", help="how packs store weights, or exact")
    parser.add_argument("--epochs", type=int, help="default: the method's own")
    parser.add_argument("--images", type=int, default=5_000, help="cifar: of each corruption")
    parser.add_argument("--learn", type=int, default=5_000, help="images that a cifar pack is learned on")
    parser.add_argument("--fast", action="store_true", help="cifar: channels-last and bfloat16")
    parser.add_argument("--rivals", nargs="*", default=["norm-stats", "roid"], help="streams beside the cifar packs")
    asked = parser.parse_args()
    if asked.part == "cifar":
        with quickly(Request(device=asked.device).place, asked.fast):
            cifar(asked)
    else:
        times(asked)


if __name__ == "__main__":
    main()
