"""Claim: one adaptation for each task of PACS answers every question that PACS is asked.

Each source network is trained once. Each task adapts it once, by `undrift` over whole domains, and from that network
and its exact pack come

    offline        the cell of `undrift bench offline`: error, NLL, ECE, AURC on the target, accuracy on the source
    routing/pacs   accuracy on the held-out 20 % of the source and on the target: of the source network, of the adapted
                   one alone, of both by the router, of both told which image is which; and for each source its network
                   with three packs, all four domains mixed image by image, beside an oracle that knows the domain
    helping        the label-free estimate of both networks' accuracy beside the truth, and its baselines
    compression    what the ways to store a pack cost in accuracy

Predicted: source within 1.0 point of the source network, target within 1.0 of the adapted one, on the mean of 12 tasks;
three packs within 2 points of the oracle.

Command:   python benchmarks/pacs.py --data ../shared/data --resnet50 FILE --cache FOLDER --fast --workers 6
           --jobs main:1 rest:0    the six main tasks with seed 1, the others with seed 0; a task may be named, too
           --tiny                  a small random network and random images: does everything run? (CPU, half a minute)
           --take FOLDER           add the records of another machine to those under --results
           Several processes share the jobs through files under --cache. Each writes what a job found when it is done,
           and a finished job is not run again. Files of images may arrive later.
Hardware:  a GPU; about 25 seconds a task where six run at once under CUDA's multi-process service.
Seeds:     as named; a seed has its own split, source network, order of images and noise.
Output:    the records named above, under --results, and a line for each job.
"""

import argparse
import copy
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import undrift
from undrift.images import TensorDomain
from undrift.judge.history import History
from undrift.judge.metrics import harmonic_mean
from undrift.posterior.perturbed import Perturbed
from undrift.system.atomic import write_text, writing
from undrift.system.progress import Bar
from undrift_bench.bench.harness.cell import Cell
from undrift_bench.bench.harness.gathered import gather
from undrift_bench.bench.harness.measure import Scoring, machine
from undrift_bench.bench.harness.quickly import quickly
from undrift_bench.bench.harness.request import Request
from undrift_bench.bench.harness.run import hearing
from undrift_bench.bench.harness.shared_jobs import SharedJob, SharedJobs
from undrift_bench.bench.harness.store import Store
from undrift_bench.bench.offline.benchmark import Offline
from undrift_bench.bench.offline.run import Adapting
from undrift_bench.bench.offline.sets import SETS, Task
from undrift_bench.bench.offline.sources import setup
from undrift_bench.bench.offline.tiny import tiny_setup

SIZE = 250  # images of a batch that is answered
LOOKED_AT, LABELLED = 512, 500  # of the target, for the label-free estimate; of the source, for its baselines
DRAWS = 4  # of an answer where ways to store are compared, one for each view: all ways have the same noise

ROUTER = "sketches"
"""By what packs are chosen; records that do not say were made by evidence alone, every layer alike."""


# PACS -----------------------------------------------------------------------------------------------------------


class Keeping(Adapting):
    """Runs offline cells, and keeps which answers were right and what the adaptation said of itself."""

    right: list[Tensor]
    history: History

    def adapted(self, cell: Cell, source: nn.Module, target: TensorDomain, each: Callable[[], None]) -> History:
        """Return what became of a copy of the source network."""
        self.right = []
        self.history = super().adapted(cell, source, target, each)
        return self.history

    def scored(self, model: Perturbed, domain: TensorDomain, batch: int, samples: int | None = None) -> Scoring:
        """Answer a domain: first the target, then the held-out part of the source."""
        scoring = super().scored(model, domain, batch, samples)
        self.right.append(scoring.right())
        return scoring


class Pacs:
    """The jobs of PACS, and what they share: images, source networks, packs."""

    def __init__(self, asked: argparse.Namespace) -> None:
        weights = {} if asked.resnet50 is None else {"resnet50": asked.resnet50}
        self.request = Request(
            data=asked.data,
            cache=asked.cache,
            results=asked.results,
            fast=asked.fast,
            device=asked.device,
            images=asked.images,
            tiny=asked.tiny,
            weights=weights,
            extra={"shared": "yes"},  # no times are recorded beside other processes
        )
        self.asked, self.device, self.tiny = asked, self.request.place, asked.tiny
        dataset = SETS["pacs"].shrunk() if asked.tiny else SETS["pacs"]
        self.made_of = tiny_setup(dataset) if asked.tiny else setup(dataset, self.request)
        if asked.epochs is not None:
            options = self.made_of.options.replace(epochs=asked.epochs)
            self.made_of = replace(self.made_of, epochs=asked.epochs, options=options)
        self.bench = Offline()
        self.running = Keeping(self.made_of, self.request)
        self.ask_of = self.running.centre

    # Which jobs there are ---------------------------------------------------------------------------------------

    def jobs(self) -> list[SharedJob]:
        """Return the jobs in their order: sources, tasks, mixtures, compression."""
        asked = list(dict.fromkeys(pair for name in self.asked.jobs for pair in self.named(name)))
        sources = list(dict.fromkeys((task.source, seed) for task, seed in asked))
        domains = list(dict.fromkeys(name for task, _ in asked for name in (task.source, task.target)))
        found = [
            SharedJob(f"images-{name}", lambda name=name: self.images(name), files=self.files(name)) for name in domains
        ]
        found += [
            SharedJob(
                f"source-{name}-s{seed}", lambda name=name, seed=seed: self.train(name, seed), (f"images-{name}",)
            )
            for name, seed in sources
        ]
        for task, seed in asked:
            needs = f"images-{task.target}", f"source-{task.source}-s{seed}"
            found.append(SharedJob(f"{task.name}-s{seed}", lambda task=task, seed=seed: self.task(task, seed), needs))
        for source, seed in sources:
            own = [task for task, other in asked if (task.source, other) == (source, seed)]
            if len(own) == len([task for task in self.made_of.dataset.tasks if task.source == source]):
                needs = tuple(f"{task.name}-s{seed}" for task in own)
                name = f"{source}-mixed-s{seed}"
                found.append(SharedJob(name, lambda own=own, seed=seed: self.mixture(own, seed), needs))
        if self.asked.compress:
            for task, seed in asked:
                name = f"{task.name}-stored-s{seed}"
                found.append(SharedJob(name, lambda t=task, s=seed: self.stored(t, s), (f"{task.name}-s{seed}",)))
        return found

    def named(self, words: str) -> list[tuple[Task, int]]:
        """Return the tasks and seeds that main:1, rest:0, all:0 or photo-sketch:2 stands for."""
        name, _, seed = words.partition(":")
        tasks = self.made_of.dataset.tasks
        return [(t, int(seed or 0)) for t in tasks if name in (t.name, "main" if t.main else "rest", "all")]

    def files(self, domain: str) -> tuple[Path, ...]:
        """Return the files that a domain waits for."""
        if self.tiny or (self.request.data / "pacs" / domain).is_dir():
            return ()
        return self.request.data / "pacs" / f"{domain}.tar", *([self.asked.resnet50] if self.asked.resnet50 else [])

    # What they do -----------------------------------------------------------------------------------------------

    def images(self, domain: str) -> str:
        """Decode a domain once, for all processes."""
        return f"{len(self.running.images(domain)):,} images"

    def train(self, domain: str, seed: int) -> str:
        """Train a source network."""
        net, home = self.fresh(domain, seed), self.running.sources.held_out(domain, seed)
        with quickly(self.device, self.request.fast), torch.no_grad():
            right = [net(self.ask_of(part)).argmax(1) for part in home.images.split(SIZE)]
        return f"{percent((torch.cat(right) == home.labels).float().mean())} of its held-out images right"

    def task(self, task: Task, seed: int) -> str:
        """Adapt once, and write what offline, helping and routing ask."""
        cell = self.cell(task, seed)
        store, heard = Store(self.request.results / "offline"), list[str]()
        with hearing(heard):
            numbers = dict(self.running(cell, Bar("pacs", 1, False), self.look, task))
        if store.finished(cell) is None:
            store.put(cell, {**machine(self.device), "fast": self.request.fast, **numbers, "warnings": heard})
        torch.cuda.empty_cache()
        ways = self.route(task, seed)
        verdict = self.running.history.verdict
        assert verdict is not None
        assert verdict.helping is not None
        both = verdict.helping.source, verdict.helping.adapted
        said = [f"{percent(estimate.value)} ± {100 * estimate.error:.0f}" for estimate in both]
        shown = [f"{way} {percent(s['source'])}/{percent(s['target'])}" for way, s in ways.items()]
        return f"ECE {100 * numbers['ece']:.1f}; source/target: {', '.join(shown)}; estimated {' → '.join(said)}"

    def look(self, _running: Adapting, cell: Cell, model: Perturbed) -> Mapping[str, Any]:
        """Save the exact pack, and compare what can be said without labels with the truth."""
        task = self.made_of.dataset.task(cell.setting)
        place = self.pack(task, cell.seed)
        place.parent.mkdir(parents=True, exist_ok=True)
        model.preprocess = self.made_of.preprocess
        undrift.save(model, place, mean="exact", name=task.target)
        self.estimate(task, cell.seed, model)
        return {}

    def estimate(self, task: Task, seed: int, model: Perturbed) -> None:
        """Write the case of helping.py: estimates and truth on the same images of the target."""
        import helping

        home, target = self.running.sources.held_out(task.source, seed), self.running.images(task.target)
        with model.off() as net:
            threshold = helping.threshold_of(net, self.ask_of(home.images[:LABELLED]), home.labels[:LABELLED])
        some = torch.randperm(len(target), generator=helping.seeded())[:LOOKED_AT].to(self.device)
        images, labels = self.ask_of(target.images[some]), target.labels[some]
        names = model.options.answer_views or None
        record = helping.compared(model, list(images.split(64)), labels, names, threshold)
        case = helping.Case("pacs", task.name, "adapt").key
        found = {"sure": helping.SURE, "cases": {case: record | machine(self.device) | {"seed": seed}}}
        gather(self.request.results / "helping.json", found)

    def route(self, task: Task, seed: int) -> dict[str, dict[str, float]]:
        """Write what routing gives: which images are right under either network, and which of them is asked."""
        packs = undrift.packs(self.fresh(task.source, seed), self.pack(task, seed))
        home, target = self.running.sources.held_out(task.source, seed), self.running.images(task.target)
        ways: dict[str, dict[str, float]] = {"source network": {}, "adapted alone": {}, "routed": {}, "told": {}}
        kept = dict[str, Tensor]()  # what an oracle gets right
        with quickly(self.device, self.request.fast):
            for row, domain, adapted in zip(("target", "source"), (target, home), self.running.right, strict=True):
                with packs.using("source"):
                    own = self.answers(packs, domain.images) == domain.labels.cpu()
                choice = self.answers(packs, domain.images, "choice", samples=1, views=())
                shown = own, adapted, torch.where(choice == 0, own, adapted), own if row == "source" else adapted
                for way, right in zip(ways, shown, strict=True):
                    ways[way][row] = float(right.float().mean())
                kept[row] = shown[3]
        for scores in ways.values():
            scores["harmonic"] = harmonic_mean([scores["source"], scores["target"]])
        with writing(self.pack(task, seed).with_suffix(".npz")) as file:
            np.savez(file, **{row: right.numpy() for row, right in kept.items()})
        record = {"bytes": self.pack(task, seed).stat().st_size, "ways": ways}
        self.write(f"{task.name}-exact-s{seed}", seed, record)
        return ways

    def mixture(self, tasks: Sequence[Task], seed: int) -> str:
        """Write what one network with all packs of its source does on all domains mixed image by image."""
        source, targets = tasks[0].source, [task.target for task in tasks]
        packs = undrift.packs(self.fresh(source, seed), *(self.pack(task, seed) for task in tasks))
        domains = [self.running.sources.held_out(source, seed), *map(self.running.images, targets)]
        rights = [np.load(self.pack(task, seed).with_suffix(".npz")) for task in tasks]
        oracle = torch.cat([torch.from_numpy(a) for a in (rights[0]["source"], *(r["target"] for r in rights))])
        images, labels = (torch.cat([getattr(d, what) for d in domains]) for what in ("images", "labels"))
        own = torch.cat([torch.full((len(d),), number) for number, d in enumerate(domains)])
        order = torch.randperm(len(own), generator=torch.Generator().manual_seed(seed))
        images, labels, own, oracle = images[order.to(images.device)], labels.cpu()[order], own[order], oracle[order]
        routed = oracle.clone()  # where the router is right, the oracle's answer is its own
        with quickly(self.device, self.request.fast):
            choice = self.answers(packs, images, "choice", samples=1, views=())
            for number, name in enumerate(packs.names):
                rows = ((choice == number) & (own != number)).nonzero()[:, 0]
                if len(rows):
                    with packs.using(name):
                        found = self.answers(packs, images[rows.to(images.device)])
                    routed[rows] = found == labels[rows]
        by_domain = {}
        for number, name in enumerate((source, *targets)):
            here = own == number
            shares = [float((choice[here] == n).float().mean()) for n in range(len(domains))]
            by_domain[name] = {
                way: float(of[here].float().mean()) for way, of in (("routed", routed), ("oracle", oracle))
            }
            by_domain[name] |= {"given to": shares}
        whole = {way: statistics.fmean(d[way] for d in by_domain.values()) for way in ("routed", "oracle")}
        record = {"names": list(packs.names), "domains": by_domain, "whole": whole, "unknown": packs.unknown}
        self.write(f"{source}-mixed-exact-s{seed}", seed, record | {"images": len(own)})
        return ", ".join(f"{way} {percent(value)}" for way, value in whole.items())

    def stored(self, task: Task, seed: int) -> str:
        """Write what the ways to store a pack cost."""
        from undrift_bench.bench.offline.storage import stored_ways

        target, net = self.running.images(task.target), self.fresh(task.source, seed)
        count = self.asked.score or len(target)
        with quickly(self.device, self.request.fast):
            images = torch.cat([self.ask_of(part) for part in target.images[:count].split(SIZE)])
            ways = stored_ways(net, self.pack(task, seed), images, target.labels[:count], samples=DRAWS)
        about = machine(self.device) | {
            "network": "ResNet-50",
            "network bytes": sum(t.nbytes for t in net.state_dict().values()),
        }
        one = {"ways": ways, "images": len(images), "samples": DRAWS, "seed": seed}
        gather(self.request.results / "compression.json", {"pacs": about | {"tasks": {task.name: one}}})
        return ", ".join(f"{way} {percent(found['accuracy'])}" for way, found in ways.items())

    # Shared -----------------------------------------------------------------------------------------------------

    def cell(self, task: Task, seed: int) -> Cell:
        """Return the offline cell of a task."""
        row = next(row for row in self.bench.rows if row.name == "undrift")
        return replace(self.bench.of(self.made_of, task, row, self.request)[0], seed=seed)

    def pack(self, task: Task, seed: int) -> Path:
        """Return where the exact pack of a task lies."""
        return self.asked.cache / "packs" / f"{task.source}-{task.target}-exact-s{seed}.safetensors"

    def fresh(self, domain: str, seed: int) -> nn.Module:
        """Return a copy of a source network on the device."""
        net = copy.deepcopy(self.running.sources.network(domain, seed)).to(self.device)
        return net.to(memory_format=torch.channels_last) if self.request.fast else net  # type: ignore[call-overload]

    def answers(self, packs: undrift.Packs, images: Tensor, what: str = "label", **how: Any) -> Tensor:
        """Return the labels of images, or which pack each is given to."""
        parts = (packs.predict(self.ask_of(part), generator=0, **how) for part in images.split(SIZE))
        return torch.cat([getattr(p, what).cpu() for p in parts])

    def write(self, name: str, seed: int, record: Mapping[str, Any]) -> None:
        """Write a record of routing."""
        about = {"router": ROUTER, "method": "undrift", "mean": "exact", "epochs": None, "seed": seed}
        about |= machine(self.device) | {"precision": self.request.precision}
        place = self.request.results / "routing" / "pacs" / f"{name}.json"
        place.parent.mkdir(parents=True, exist_ok=True)
        write_text(place, json.dumps(about | dict(record), indent=1) + "\n")


def percent(share: float | Tensor) -> str:
    """Return a share of 1 as per cent."""
    return f"{100 * float(share):.1f}"


# Records --------------------------------------------------------------------------------------------------------


def take(folder: Path, results: Path) -> None:
    """Add the records of another machine: whole files, except those that gather several cases."""
    for place in sorted(folder.rglob("*.json")):
        to = results / place.relative_to(folder)
        if place.name in ("helping.json", "compression.json"):
            gather(to, json.loads(place.read_text("utf-8")))
        elif not to.is_file():
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(place, to)
        else:
            print(f"{to} is there already: left as it is")


def main(given: Sequence[str]) -> int:
    """Do the jobs, in as many processes as asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--cache", type=Path, help="for decoded images, source networks, exact packs, finished jobs")
    parser.add_argument("--resnet50", type=Path, help="ImageNet's weights")
    parser.add_argument("--images", type=int, help="of each domain, to try things out (all)")
    parser.add_argument("--epochs", type=int, help="of sources and adaptation, to try things out")
    parser.add_argument("--jobs", nargs="+", default=["main:0", "rest:0"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--fast", action="store_true", help="channels-last and bfloat16")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--seconds", type=float, default=3600, help="begin no job after so long")
    parser.add_argument("--compress", action="store_true", help="store each pack in every way, too, at the end")
    parser.add_argument("--score", type=int, help="images that ways to store are scored on (all)")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--take", type=Path, help="a folder of records to add")
    asked = parser.parse_args(given)
    if asked.take is not None:
        take(asked.take, asked.results)
        return 0
    if asked.cache is None:
        parser.error("--cache is needed, or --take")
    if asked.workers > 1:
        command = [sys.executable, __file__, *given, "--workers", "1"]
        return max(worker.wait() for worker in [subprocess.Popen(command) for _ in range(asked.workers)])
    torch.set_num_threads(1)
    pacs = Pacs(asked)
    torch.zeros(1, device=pacs.device)  # the first use of a GPU takes seconds, and images may be still on their way
    jobs = SharedJobs(asked.cache / "jobs", pacs.jobs())

    def say(line: str) -> None:
        torch.cuda.empty_cache()  # what ten draws at once took is for the others now; nothing without a GPU
        print(time.strftime("%H:%M:%S"), line, flush=True)

    jobs.work(asked.seconds, say)
    return int(any(jobs.failed(job.name) for job in jobs.jobs))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
