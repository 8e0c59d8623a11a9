"""Question: do views, confidence and labels tell a batch of few classes from one that is a sample of a hard domain?

WRN-40-2 on clean CIFAR-10 images, the development corruptions (severities 5 and 3) and three harder shifts (a tenth of
the contrast, a fifth on grey, noise of a quarter); the demo's network on digits, which answers shifts of contrast and
brightness with one or two classes. Batches of 64 of all classes, of one, two, three and five; never the fifteen that
results are reported on. The source network answers each batch and views of it, with the posterior of norm statistics
that a stream uses before its first step: with the batch in it, and with the batch in the first half of the norm layers
only (`Teacher.doubt`).

The rule for the limits of `undrift.loop.pacing`: no batch of all classes counts as misleading while one of the two
kinds of statistics gets a fifth of it right; then as many of one class as can be; round numbers. Seen: in batches of
all classes that would count by the other signs, own statistics make answers worse by 0.059 at most, so the limit is a
third more: 0.08. Signs that were tried: the distance of the last norm layer's means, which took hard domains for runs;
disagreement with the mirror image, which takes digits of little contrast for runs; confidence alone, which misses six
of 33 runs of photographs. The limits were chosen on these batches and on those of two more small networks, trained on
scans of digits, that are not kept.

A mirrored digit is no digit, so small shifts are looked at, too (`undrift.answer.views.UNLIKE`). The rule: of 2, 3 and
4 the least at which mirror images still tell every batch of photographs that they tell without it: 3.

Who answers a run? 64 images of each class, and of pairs of classes, by the source network, by the adapted one with the
batch in its first norm layers only, and by the mean of both that a stream takes (`undrift.loop.pacing.answer_of_run`).
The rule for FEW, of 0, 2, 3, 5, 8 and 12, on other images of these kinds: the least sum of errors. The rule for SAME,
of 0, 1, 2 and 4, on these and the two networks above: the same.

Command:   python benchmarks/runs_by_views.py --data ../shared/data
Hardware:  one CPU core; five minutes.
Seeds:     1.
Output:    runs_by_views.json under --results, and two Markdown tables, for docs/explanation/unattended.md.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import undrift
from undrift.answer.views import SAME, VIEWS, ReversibleView
from undrift.images import TensorDomain
from undrift.images.corrupt import DEVELOPMENT, corrupt
from undrift.likelihood import Teacher
from undrift.loop.pacing import answer_of_run, misleading
from undrift.system.atomic import write_text
from undrift_bench import zoo
from undrift_bench.bench.harness.measure import machine
from undrift_bench.bench.harness.table import markdown
from undrift_bench.data import cifar10
from undrift_bench.demo.setting import DemoSetting, load_world

Shift = Callable[[Tensor], Tensor]
BATCH, PRIOR = 64, 16
SHOWN = ("all classes", "one class")  # in the docs; the record has all
PAIRS = [(1, 9), (3, 5), (0, 2), (4, 6)]
CLASSES = {"one class": [(0,), (5,)], "two": [(1, 9)], "three": [(2, 4, 6)], "five": [(0, 2, 4, 6, 8)]}

HARD_PHOTOGRAPHS: dict[str, Shift] = {
    "a tenth of the contrast": lambda x: 0.1 * x,
    "a fifth of it on grey": lambda x: 0.2 * x + 0.4,
    "noise": lambda x: noisy(x, 0.25),
}
HARD_DIGITS: dict[str, Shift] = {
    "a third of the contrast": lambda x: 0.3 * x + 0.35,
    "dark": lambda x: 0.15 * x,
    "bright": lambda x: (x + 0.4).clamp(0, 1),
    "noise": lambda x: noisy(x, 0.3),
}


def batches(labels: Tensor) -> list[tuple[str, Tensor]]:
    """Return the places of every batch's images, and what they are of."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    found = [("all classes", part) for part in order[: 2 * BATCH].split(BATCH)]
    for name, sets in CLASSES.items():
        for few in sets:
            each = -(-BATCH // len(few))
            found.append((name, torch.cat([order[labels[order] == c][:each] for c in few])[:BATCH]))
    return found


def shifts(hard: Mapping[str, Shift]) -> dict[str, Shift]:
    """Return what changes images in [0, 1]: nothing, the development corruptions, and harder shifts."""

    def corruption(name: str, severity: int) -> Shift:
        return lambda x: corrupt(x.expand(-1, 3, -1, -1), name, severity)[:, : x.shape[1]]

    names = [(name, severity) for name in DEVELOPMENT for severity in (5, 3)]
    return {"clean": lambda x: x} | {f"{name} {s}": corruption(name, s) for name, s in names} | dict(hard)


def noisy(x: Tensor, size: float) -> Tensor:
    """Return images with noise."""
    return x + size * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))


def as_floats(domain: TensorDomain) -> Tensor:
    """Return the images in [0, 1]."""
    return domain.images.float() / 255 if domain.images.dtype == torch.uint8 else domain.images


def looked_at(net: nn.Module, domain: TensorDomain, of: str, changes: Mapping[str, Shift]) -> list[dict[str, Any]]:
    """Return what speaks for every batch being of few classes, and what both kinds of statistics cost."""
    model = undrift.perturb(net, layers=(), norm_statistics="train").eval()
    rows = []
    for name, change in changes.items():
        for kind, places in batches(domain.labels):
            images, labels = change(as_floats(domain)[places]), domain.labels[places]
            teacher = Teacher(prior_images=PRIOR)
            if not teacher.supports(model):
                raise RuntimeError("the network has no batch norm")
            doubt = teacher.doubt(model, images)
            told = [teacher.each_alone(model, images, [SAME], counted)[0].argmax(1) for counted in (True, False)]
            errors = [float((label != labels).float().mean()) for label in told]
            row = {"images": of + name, "classes": kind, "errors": errors}
            rows.append(row | doubt._asdict() | {"misleading": misleading(doubt)})
        print(of + name, flush=True)
    model.remove()
    return rows


def answered(
    net: nn.Module, domain: TensorDomain, of: str, changes: Mapping[str, Shift], views: Sequence[ReversibleView]
) -> dict[str, dict[str, list[float]]]:
    """Return the errors of each way to answer a run, class by class, then of pairs of classes."""
    model = undrift.perturb(net, layers=(), norm_statistics="train").eval()
    order = torch.randperm(len(domain.labels), generator=torch.Generator().manual_seed(1))
    found: dict[str, dict[str, list[float]]] = {}
    for name, change in changes.items():
        errors: dict[str, list[float]] = {"source": [], "adapted": [], "both": []}
        for its in [*((c,) for c in range(10)), *PAIRS]:
            each = BATCH // len(its)
            places = torch.cat([order[domain.labels[order] == c][:each] for c in its])
            images = change(as_floats(domain)[places])
            teacher = Teacher(prior_images=PRIOR)
            teacher.supports(model)
            adapted = torch.stack(teacher.each_alone(model, images, views, False)).mean(0)
            with model.off() as source, torch.no_grad():
                own = source(images).softmax(1)
            for way, probs in zip(errors, (own, adapted, answer_of_run(own, adapted)), strict=True):
                errors[way].append(float((probs.argmax(1) != domain.labels[places]).float().mean()))
        found[of + name] = errors
        print(of + name, {way: round(100 * sum(each) / len(each), 1) for way, each in errors.items()}, flush=True)
    model.remove()
    return found


def main() -> None:
    """Ask the source networks about every batch, and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    net = zoo.load("wrn40_2", asked.data / "cifar10/wrn40_2.safetensors").eval()
    world = load_world(DemoSetting(held_out_images=None))
    beds = [
        (net, cifar10(asked.data / "cifar10"), "", shifts(HARD_PHOTOGRAPHS), [SAME, VIEWS["mirror"]]),
        (world.net.eval(), world.held_out, "digits, ", shifts(HARD_DIGITS), [SAME]),
    ]
    record = machine(torch.device("cpu")) | {"batch": BATCH, "prior": PRIOR}
    record["errors"] = {name: ways for bed in beds for name, ways in answered(*bed).items()}
    record["batches"] = [row for bed in beds for row in looked_at(*bed[:4])]
    write_text(asked.results / "runs_by_views.json", json.dumps(record, indent=1) + "\n")
    print(answers_table(record), signs_table(record), sep="\n\n")


def answers_table(record: Mapping[str, Any]) -> str:
    """Return the mean errors of each way to answer a run."""
    rows = [
        [name.replace("_", " "), *(f"{100 * sum(each) / len(each):.1f}" for each in errors.values())]
        for name, errors in record["errors"].items()
    ]
    return markdown(["error %, classes in runs", "source network", "adapted network", "both"], rows)


def signs_table(record: Mapping[str, Any]) -> str:
    """Return the signs in batches of all classes and of one, one row per shift and kind of batch."""
    kinds = dict.fromkeys((row["images"], row["classes"]) for row in record["batches"] if row["classes"] in SHOWN)
    rows = []
    for name, kind in kinds:
        mine = [row for row in record["batches"] if (row["images"], row["classes"]) == (name, kind)]
        left = ", ".join(f"{row['kept'] / max(row['counted'], 1e-9):.2f}" for row in mine)
        rows.append(
            [
                f"{name.replace('_', ' ')}, {kind}",
                ", ".join(" → ".join(f"{100 * e:.0f}" for e in row["errors"]) for row in mine),
                *(", ".join(f"{row[what]:.2f}" for row in mine) for what in ("views", "worse")),
                left,
                ", ".join("yes" if row["misleading"] else "no" for row in mine),
            ]
        )
    return markdown(["images", "error %, all → first half", "views disagree", "worse", "labels left", "a run"], rows)


if __name__ == "__main__":
    main()
