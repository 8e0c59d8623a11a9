"""Question: do the views of images tell a batch of few classes from one that is a sample of its domain?

WRN-40-2 on clean CIFAR-10 images and the development corruptions (severity 5), batches of 64 of all classes, of one,
two, three and five; never the fifteen that results are reported on. The source network answers each batch and its
mirror images, with the posterior of norm statistics that a stream uses before its first step: with the batch in it, and
without.

The rule for the factor of `undrift.loop.pacing`: of 1.25, 1.5 and 2 the least at which no batch of all classes counts
as misleading. Seen: 1.5, as one batch of speckle noise is at 1.3. For the margin, of 0.05, 0.1, 0.15 and 0.2: the
largest at which every batch of one class that is found at 0.05 is found. Seen: 0.15.

Command:   python benchmarks/runs_by_views.py --data ../shared/data
Hardware:  one CPU core; a minute.
Seeds:     1.
Output:    runs-by-views.json under --results, and a Markdown table on the terminal.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

import undrift
from undrift.answer.views import disagreement, mirror
from undrift.images.corrupt import DEVELOPMENT, corrupt
from undrift.loop.pacing import misleading
from undrift.posterior.domain_statistics import DomainStatistics
from undrift.system.atomic import write_text
from undrift_bench import zoo
from undrift_bench.bench.harness.measure import machine
from undrift_bench.data import cifar10

BATCH, PRIOR = 64, 16
CLASSES = {"one class": [(0,), (5,)], "two": [(1, 9)], "three": [(2, 4, 6)], "five": [(0, 2, 4, 6, 8)]}


def batches(labels: Tensor) -> list[tuple[str, Tensor]]:
    """Return the places of every batch's images, and what they are of."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    found = [("all classes", part) for part in order[: 2 * BATCH].split(BATCH)]
    for name, sets in CLASSES.items():
        for few in sets:
            each = -(-BATCH // len(few))
            found.append((name, torch.cat([order[labels[order] == c][:each] for c in few])[:BATCH]))
    return found


def main() -> None:
    """Ask the source network about every batch, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    domain = cifar10(asked.data / "cifar10")
    net = zoo.load("wrn40_2", asked.data / "cifar10/wrn40_2.safetensors").eval()
    model = undrift.perturb(net, layers=(), norm_statistics="train").eval()
    rows = []
    for name in ("clean", *DEVELOPMENT):
        for kind, places in batches(domain.labels):
            images, labels = domain.images[places], domain.labels[places]
            images = images if name == "clean" else corrupt(images, name, 5)
            images = images.float() / 255 if images.dtype == torch.uint8 else images
            statistics = DomainStatistics(PRIOR)
            statistics.start(model)
            errors, apart = [], []
            for first, then in (("batch", "again"), ("kept", "again")):
                found = []
                for how, seen in ((first, images), (then, mirror(images))):
                    with statistics.answering(model, how), torch.no_grad():
                        found.append(model(seen).softmax(1))
                errors.append(float((found[0].argmax(1) != labels).float().mean()))
                apart.append(disagreement(*found))
            error = float((apart[0] - apart[1]).std()) / BATCH**0.5
            told = misleading(float(apart[0].mean()), float(apart[1].mean()), error)
            row = {"images": name, "classes": kind, "errors": errors, "apart": [float(a.mean()) for a in apart]}
            rows.append(row | {"standard error": error, "misleading": told})
    record = machine(torch.device("cpu")) | {"batch": BATCH, "prior": PRIOR, "batches": rows}
    write_text(asked.results / "runs-by-views.json", json.dumps(record, indent=1) + "\n")
    print(
        "| images | error %, with the batch's statistics → without | disagreement, with → without | taken for a run |"
    )
    print("|---|---|---|---|")
    for name in ("clean", *DEVELOPMENT):
        for kind in ("all classes", *CLASSES):
            mine = [row for row in rows if (row["images"], row["classes"]) == (name, kind)]
            wrong = ", ".join(f"{100 * row['errors'][0]:.0f} → {100 * row['errors'][1]:.0f}" for row in mine)
            away = ", ".join(f"{row['apart'][0]:.2f} → {row['apart'][1]:.2f}" for row in mine)
            said = ", ".join("yes" if row["misleading"] else "no" for row in mine)
            print(f"| {name.replace('_', ' ')}, {kind} | {wrong} | {away} | {said} |")


if __name__ == "__main__":
    main()
