"""Question: by what should a router tell packs from each other, and a pack from the source?

Evidence is one pass of the source network, so this needs no adapted one. Half of a domain's images make its pack's
moments, the other half is routed; of the source, images that its statistics did not see. Five cases:

    PACS    ImageNet's ResNet-50 whose batch norms saw 150 images of one domain (so it is a source network in what a
            router looks at: its running statistics), and packs of the other three; four such networks. 128 pixels.
    CIFAR   WRN-40-2, clean images the source, packs of the three development corruptions, severity 5.

Ways:
    evidence            log KL, the mean of all layers; the least answers (the router of the H200 records of 2026-11-19)
    weighed layers      against the source, a layer counts as it tells the pack's own images from the source, and at
                        most 5 % of these go to the source
    sketches            between packs, the linear discriminant of four numbers per layer; against the source, evidence
    both                what `undrift.packs` does
    Gaussian            likelihood of each channel's mean and log-variance, spreads shared half and half
    all channels        the linear discriminant between packs of every channel's mean and log-variance; a pack of 3 MB

Rule: of the ways that keep a pack small (50 kB of router tensors for ResNet-50), the one with the highest mean over the
cases of the share of images that go to their own network, each domain counting once in its case; within 0.3 points the
simpler. The ways were found on these cases, which are development data for that reason: adapted networks are the test.

Predicted: packs of the sketch network gain most, ten points or more; the source of the photo network three to five.

Command:   python benchmarks/router_trials.py --data ../shared/data --resnet50 FILE --cache FOLDER
Hardware:  two CPU cores, 10 minutes.
Seeds:     none: no randomness but the corruptions' seed 0.
Output:    router_trials.json under --results, and a table on the terminal.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from undrift.images.corrupt import DEVELOPMENT, corrupt
from undrift.images.preprocess import SHOT
from undrift.packs.evidence import FLOOR, DomainMoments, Gathering
from undrift.packs.moments import ImageMoments, watching
from undrift.packs.router import Router
from undrift.packs.sketch import SHRINK
from undrift.system.atomic import write_text
from undrift_bench import zoo
from undrift_bench.bench.harness.measure import machine
from undrift_bench.data import cifar10, pacs

PACS = ("photo", "art_painting", "cartoon", "sketch")
SMALL = replace(SHOT, resize=(146, 146), crop=128)
SEEN, IMAGES, HOME = 150, 200, 100  # by the source's statistics; of a domain; of the source, to be routed
CIFAR = 600

Score = Callable[[ImageMoments], Tensor]
"""Returns how far images are from the source and from each pack, images × networks."""


@dataclass(frozen=True)
class Case:
    """A source network, as a router sees it, and the images of its packs."""

    name: str
    source: DomainMoments
    packs: Mapping[str, tuple[ImageMoments, ImageMoments]]  # to learn from, to be routed
    home: ImageMoments

    def moments(self) -> dict[str, DomainMoments]:
        """Return what each pack would hold."""
        found = {}
        for name, (own, _) in self.packs.items():
            gathering = Gathering()
            gathering.add(own)
            moments = gathering.moments(whole=True, source=self.source)
            assert moments is not None
            found[name] = moments
        return found


# The cases -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def look(net: nn.Module, images: Tensor) -> ImageMoments:
    """Return the moments of images under a network."""
    parts = []
    with watching(net) as watch:
        for part in images.split(25):
            net(part)
            seen = watch.moments()
            assert seen is not None
            parts.append(seen)
    return ImageMoments(parts[0].layers, *(torch.cat([getattr(p, k) for p in parts]) for k in ("mean", "var")))


def halves(seen: ImageMoments) -> tuple[ImageMoments, ImageMoments]:
    """Return the first and the second half of images."""
    half = len(seen) // 2
    return rows(seen, slice(0, half)), rows(seen, slice(half, None))


def rows(seen: ImageMoments, which: slice) -> ImageMoments:
    """Return some of the images."""
    return ImageMoments(seen.layers, seen.mean[which], seen.var[which])


def pacs_case(source: str, images: Mapping[str, Tensor], weights: Path) -> Case:
    """Return the case of one domain as the source."""
    net = zoo.transfer("resnet50_v1", weights, 7)
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = None  # a plain mean of all batches
            layer.reset_running_stats()
    with torch.no_grad():
        for part in images[source][:SEEN].split(25):
            net.train()(part)
    net.eval()
    moments = DomainMoments.of_source(net)
    assert moments is not None
    others = {name: halves(look(net, images[name][:IMAGES])) for name in PACS if name != source}
    return Case(source, moments, others, look(net, images[source][SEEN : SEEN + HOME]))


def cifar_case(data: Path) -> Case:
    """Return the case of CIFAR-10 and three corruptions."""
    net = zoo.load("wrn40_2", data / "wrn40_2.safetensors")
    clean = cifar10(data).images[:CIFAR]
    moments = DomainMoments.of_source(net)
    assert moments is not None
    packs = {name: halves(look(net, corrupt(clean, name, 5).float() / 255)) for name in DEVELOPMENT}
    return Case("CIFAR-10", moments, packs, halves(look(net, clean.float() / 255))[1])


def cases(asked: argparse.Namespace) -> list[Case]:
    """Return all cases, from the cache where they are there."""
    asked.cache.mkdir(parents=True, exist_ok=True)
    images: dict[str, Tensor] = {}
    found = []
    for name in (*PACS, "CIFAR-10"):
        place = asked.cache / f"router-{name}.pt"
        if not place.is_file():
            if name in PACS and not images:
                for domain in PACS:
                    some = pacs(asked.data / "pacs", domain, preprocess=SMALL).select(range(SEEN + IMAGES)).hold()
                    images[domain] = SMALL.normalise(some.images)
            case = pacs_case(name, images, asked.resnet50) if name in PACS else cifar_case(asked.data / "cifar10")
            torch.save(_plain(case), place)
            print(f"looked at {name}", flush=True)
        found.append(_case(torch.load(place)))
    return found


def _plain(case: Case) -> dict[str, Any]:
    packs = {name: tuple((dict(s.layers), s.mean, s.var) for s in pair) for name, pair in case.packs.items()}
    home = (dict(case.home.layers), case.home.mean, case.home.var)
    return {"name": case.name, "source": case.source.state(), "packs": packs, "home": home}


def _case(state: Mapping[str, Any]) -> Case:
    packs = {name: (ImageMoments(*a), ImageMoments(*b)) for name, (a, b) in state["packs"].items()}
    return Case(state["name"], DomainMoments.of_state(state["source"]), packs, ImageMoments(*state["home"]))


# The ways ------------------------------------------------------------------------------------------------------


def routed(case: Case, weights: bool, sketches: bool) -> Score:
    """Return the router of `undrift.packs`, or with less than all that a pack holds."""
    packs = {
        name: replace(m, weights=m.weights if weights else None, sketch=m.sketch if sketches else None)
        for name, m in case.moments().items()
    }
    router = Router({"source": case.source, **packs}, torch.device("cpu"))

    def score(seen: ImageMoments) -> Tensor:
        nearest = router.routes(seen).nearest
        return 1.0 - torch.nn.functional.one_hot(nearest, 1 + len(packs)).float()

    return score


def gaussian(case: Case) -> Score:
    """Return the likelihood of means and log-variances, channel by channel."""
    own = case.moments()
    scale = [case.source.var, *(m.var for m in own.values())]
    scale = [part.clamp_min(1e-12) for part in scale]
    learn = [pair[0] for pair in case.packs.values()]
    logs = [(s.var / v).clamp_min(FLOOR).log() for s, v in zip(learn, scale[1:], strict=True)]
    spread = torch.stack([s.mean.var(0) / v for s, v in zip(learn, scale[1:], strict=True)])
    log_spread = torch.stack([part.var(0) for part in logs])
    shared = (spread.mean(0), log_spread.mean(0), torch.stack([part.mean(0) for part in logs]).mean(0))
    parts = [(case.source.mean, shared[0], shared[2], shared[1], scale[0])]
    for i, moments in enumerate(own.values()):
        of_mean, of_log = (spread[i] + shared[0]) / 2, (log_spread[i] + shared[1]) / 2
        parts.append((moments.mean, of_mean, logs[i].mean(0), of_log, scale[i + 1]))
    sizes = list(case.source.layers.values())

    def score(seen: ImageMoments) -> Tensor:
        out = []
        for mean, of_mean, log, of_log, v in parts:
            var, log_var = (of_mean * v).clamp_min(1e-12), of_log.clamp_min(1e-4)
            away = (seen.mean - mean).square() / var + var.log()
            away = away + ((seen.var / v).clamp_min(FLOOR).log() - log).square() / log_var + log_var.log() + v.log()
            out.append(torch.stack([part.mean(1) for part in away.clamp(max=100).split(sizes, 1)], 1).mean(1))
        return torch.stack(out, 1)

    return score


def all_channels(case: Case) -> Score:
    """Return the linear discriminant of every channel between packs; against the source as the router does."""

    def numbers(seen: ImageMoments) -> Tensor:
        v = case.source.var.clamp_min(1e-12)
        return torch.cat([(seen.mean - case.source.mean) / v.sqrt(), (seen.var / v).clamp_min(FLOOR).log()], 1)

    learn = [numbers(pair[0]).clamp(-10, 10).double() for pair in case.packs.values()]
    mean = torch.stack([part.mean(0) for part in learn], 1)
    within = torch.cat([part - part.mean(0) for part in learn])
    diagonal = within.var(0).clamp_min(1e-4)
    # (D/2 + RᵀR/2n)⁻¹ by way of a matrix of images × images
    half = within * ((1 - SHRINK) / len(within)) ** 0.5
    base = SHRINK * diagonal
    inner = torch.linalg.inv(torch.eye(len(half), dtype=torch.float64) + (half / base) @ half.T)
    away = mean - mean.mean(1, keepdim=True)
    first = away / base[:, None]
    weights = first - (half / base).T @ (inner @ (half @ first))
    offset = 0.5 * ((mean + mean.mean(1, keepdim=True)) * weights).sum(0)
    against = routed(case, weights=True, sketches=True)

    def score(seen: ImageMoments) -> Tensor:
        found = offset - numbers(seen).clamp(-10, 10).double() @ weights
        home = against(seen)[:, 0] == 0
        return torch.cat([torch.where(home, -torch.inf, torch.inf)[:, None], found], 1)

    return score


WAYS: Mapping[str, Callable[[Case], Score]] = {
    "evidence": lambda case: routed(case, weights=False, sketches=False),
    "weighed layers": lambda case: routed(case, weights=True, sketches=False),
    "sketches": lambda case: routed(case, weights=False, sketches=True),
    "both": lambda case: routed(case, weights=True, sketches=True),
    "Gaussian": gaussian,
    "all channels": all_channels,
}


def measured(case: Case, way: Callable[[Case], Score]) -> dict[str, Any]:
    """Return the share of each domain's images that go to each network; the right one is in the diagonal."""
    score, count = way(case), 1 + len(case.packs)
    held = [case.home, *(pair[1] for pair in case.packs.values())]
    given = [torch.bincount(score(seen).argmin(1), minlength=count) / len(seen) for seen in held]
    return {
        "right": statistics.fmean(float(shares[i]) for i, shares in enumerate(given)),
        "source": float(given[0][0]),
        "packs": statistics.fmean(float(shares[i]) for i, shares in enumerate(given) if i),
        "given to": [shares.tolist() for shares in given],
    }


def estimated(case: Case, folder: Path) -> dict[str, dict[str, float]]:
    """Return what one pack beside the source would cost in accuracy, in points, on the mean of the packs.

    The share of images that go to the wrong network, times what that network loses on them in the H200 records.
    """
    found = {}
    for way in ("evidence", "both"):
        lost: dict[str, list[float]] = {"source": [], "target": []}
        for name, pair in case.packs.items():
            record = json.loads((folder / f"{case.name}-{name}-ternary-s0.json").read_text("utf-8"))["ways"]
            one = replace(case, packs={name: pair})
            wrong = [1 - share for share in (measured(one, WAYS[way])[part] for part in ("source", "packs"))]
            own, adapted = record["source network"], record["adapted alone"]
            lost["source"].append(100 * wrong[0] * (own["source"] - adapted["source"]))
            lost["target"].append(100 * wrong[1] * (adapted["target"] - own["target"]))
        found[way] = {part: statistics.fmean(values) for part, values in lost.items()}
    return found


def refused(case: Case) -> dict[str, float]:
    """Return the share of images beyond the limit: of the packs' own domains, and of one whose pack is left out."""
    moments, own, other = case.moments(), list[float](), list[float]()
    for left in case.packs:
        rest = {name: m for name, m in moments.items() if name != left}
        for packs, found in ((moments, own), (rest, other)):
            routes = Router({"source": None, **packs}, torch.device("cpu")).routes(case.packs[left][1])
            found.append(float((~routes.known).float().mean()))
    return {"own": statistics.fmean(own), "of a domain without a pack": statistics.fmean(other)}


def page(record: Mapping[str, Any]) -> str:
    """Return the table for docs/explanation/routing.md."""
    names = list(record["cases"])
    head = [f"{name}{' network' if name in PACS else ''}" for name in names]
    lines = [f"| images that go to their own network, % | {' | '.join(head)} | mean |", "|---|" + "---:|" * 6]
    for way in WAYS:
        found = [record["cases"][name]["ways"][way] for name in names]
        cells = [f"{100 * one['right']:.1f}" for one in found]
        mean = statistics.fmean(one["right"] for one in found)
        lines.append(f"| {way} | " + " | ".join([*cells, f"{100 * mean:.1f}"]) + " |")
    for part, title in (("source", "of the source"), ("packs", "of the packs' domains")):
        for way in ("evidence", "both"):
            found = [100 * record["cases"][name]["ways"][way][part] for name in names]
            cells = [f"{value:.1f}" for value in (*found, statistics.fmean(found))]
            lines.append(f"| {title}: {way} | " + " | ".join(cells) + " |")
    for way in ("evidence", "both"):
        losses = [record["cases"][name]["estimated loss"][way] for name in names if name in PACS]
        means = [statistics.fmean(one[part] for one in losses) for part in ("source", "target")]
        cells = [f"{one['source']:.1f} / {one['target']:.1f}" for one in losses]
        lines.append(f"| one pack, estimated loss, source / target: {way} | {' | '.join(cells)} | | ")
        lines[-1] += f"{means[0]:.2f} / {means[1]:.2f} |"
    return "\n".join([*lines, "", f"{record['hardware']}, {record['date']}: `benchmarks/router_trials.py`."])


def main() -> None:
    """Compare the ways, and write router_trials.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--resnet50", type=Path, required=True, help="ImageNet's weights, in the v1 layout")
    parser.add_argument("--cache", type=Path, required=True, help="for the moments of images")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    asked = parser.parse_args()
    record: dict[str, Any] = machine(torch.device("cpu")) | {"cases": {}}
    for case in cases(asked):
        sizes = [sum(t.nbytes for t in m.sketch.tensors().values()) for m in case.moments().values() if m.sketch]
        ways = {name: measured(case, way) for name, way in WAYS.items()}
        record["cases"][case.name] = {
            "networks": ["source", *case.packs],
            "sketch bytes": max(sizes),
            "refused": refused(case),
            "estimated loss": estimated(case, asked.results / "routing" / "pacs") if case.name in PACS else {},
            "ways": ways,
        }
    write_text(asked.results / "router_trials.json", json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    print(page(record))


if __name__ == "__main__":
    main()
