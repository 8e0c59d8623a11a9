"""Question: which noise, memory and replay should `undrift` have in a stream, and what should `undrift-light` learn?

WRN-40-2 on CIFAR-10 and ResNeXt-29 on CIFAR-100, one stream of fifteen development domains, never reset: speckle
noise, Gaussian blur and saturate alone and two after the other, at several severities. The source errs by about as
much on them as on the fifteen corruptions that results are reported on, which are never looked at here. ResNet-50 on
ImageNet sees the first four of them. Each trial is a method with what its line of `trials` changes. "As it is" in the
record is the method before the record.

The rule, written before anything ran, on the error over the whole stream; one change per method:

- A change is taken if WRN-40-2 gains 0.3 points by it or more, and ResNeXt-29 loses no more than 0.2; of several, the
  one with the least sum of both errors. Combinations of changes that gain are tried, by the same rule.
- `undrift-light` looks at mirror images alone, which saves two of its four passes, unless that costs 0.3 points.
- Where a rival over views beats `undrift-light` by 0.3 points on both, the page says so.
- A change that was taken on CIFAR stays for all networks if ResNet-50 loses no more than 0.3 points by it.

Predicted: a longer memory gains 0.2 to 0.5 points for `undrift`, as this stream is longer than those that chose 40,000;
certainty gains a point for `undrift-light`, which has no other reason to decide, and nothing for `undrift`. Found: a
longer memory loses or changes nothing (one that grows with the images seen was tried, too, and is not kept); σ² = 0.1
Var and replay gain, and more together. docs/explanation/defaults.md has the table.

Command:   python benchmarks/recipe_trials.py --data ../shared/data --device cuda --jobs 12 [--images 1500]
           python benchmarks/recipe_trials.py --tiny                                            does everything run?
           python benchmarks/recipe_trials.py --table                                           print what was found
Output:    recipe_trials.json under --results, trial by trial; a finished trial is not run again.
Seeds:     0, and 1 for the defaults.
"""

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn

import undrift
from undrift.images import FileDomain, Preprocess
from undrift.images.corrupt import DEVELOPMENT, corrupt
from undrift.images.preprocess import RAW
from undrift.judge.metrics import scored
from undrift.system.atomic import write_text
from undrift_bench import zoo
from undrift_bench.bench.harness.measure import machine, wait
from undrift_bench.bench.harness.networks import tiny_data, tiny_network
from undrift_bench.bench.harness.quickly import by_pass, quickly
from undrift_bench.bench.harness.request import Request
from undrift_bench.data import cifar10, cifar100, imagenet

IMAGES = 3000
NOISE, BLUR, COLOUR = DEVELOPMENT  # speckle noise, Gaussian blur, saturate
Domain = tuple[tuple[str, int], ...]
DOMAINS: tuple[Domain, ...] = (
    ((NOISE, 5),),
    ((BLUR, 5),),
    ((BLUR, 4), (NOISE, 4)),
    ((COLOUR, 5),),
    ((COLOUR, 4), (BLUR, 4)),
    ((NOISE, 4), (COLOUR, 4)),
    ((NOISE, 3),),
    ((COLOUR, 5), (BLUR, 5)),
    ((COLOUR, 3),),
    ((NOISE, 4), (BLUR, 4)),
    ((COLOUR, 4), (NOISE, 4)),
    ((BLUR, 3),),
    ((NOISE, 5), (COLOUR, 5)),
    ((BLUR, 5), (NOISE, 5)),
    ((BLUR, 4), (COLOUR, 4)),
)
"""Corruptions, in the order in which they are laid on the image, with their severities."""


@dataclass(frozen=True)
class Source:
    """A source network: what tables call it, its data and file, and how much of the stream it sees."""

    title: str
    data: Callable[[Path], Any]
    file: str
    batch: int = 200
    domains: int = len(DOMAINS)
    images: int = IMAGES


NETWORKS = {
    "wrn40_2": Source("WRN-40-2, CIFAR-10", cifar10, "cifar10/wrn40_2.safetensors"),
    "resnext29": Source("ResNeXt-29, CIFAR-100", cifar100, "cifar100/resnext29.safetensors"),
    "resnet50_v1": Source("ResNet-50, ImageNet", imagenet, "imagenet/resnet50_imagenet.safetensors", 64, 4, 640),
}


@dataclass(frozen=True)
class Trial:
    """One stream: a network, a method, what is changed of it, and a seed."""

    name: str
    network: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    method: str = "undrift"
    seed: int = 0

    @property
    def key(self) -> str:
        """Its name in the record."""
        return f"{self.network}: {self.method}, {self.name}, seed {self.seed}"


def trials() -> list[Trial]:
    """Return every trial; those that decide most come first."""
    slow, light, vmp = "undrift", "undrift-light", "vmp-roid"
    held = {"most_views": 1, "memory": 4000, "ensemble": 0.99}
    mirror = {"answer_views": ("mirror",)}
    both: list[tuple[str, str, dict[str, Any]]] = [
        (light, "mirror, certainty 0.3, memory 4,000, ensemble", {**held, "certainty": 0.3}),
        (light, "mirror, certainty 1, memory 4,000, ensemble", {**held, "certainty": 1.0}),
        (vmp, "over mirror images", mirror),
        (vmp, "over mirror images, σ² = 0.1 Var", {**mirror, "init_fraction": 0.1}),
    ]
    one: list[tuple[str, str, dict[str, Any]]] = [
        (slow, "σ² = 0.2 Var, replay", {"init_fraction": 0.2}),
        (slow, "σ² = 0.1 Var, replay, memory 20,000", {"memory": 20_000}),
        (slow, "σ² = 0.1 Var, replay, certainty 0.1", {"certainty": 0.1}),
        (light, "mirror, certainty 0.3, memory 4,000", {**held, "ensemble": 1.0, "certainty": 0.3}),
        (light, "mirror, certainty 1, memory 1, ensemble", {**held, "certainty": 1.0, "memory": 1}),
        (light, "mirror, certainty 0.3, memory 20,000, ensemble", {**held, "certainty": 0.3, "memory": 20_000}),
        (light, "mirror, memory 4,000, ensemble", held),
        (light, "mirror, certainty 1, memory 4,000, ensemble, replay", {**held, "certainty": 1.0, "replay": 1000}),
    ]
    large: list[tuple[str, str, dict[str, Any]]] = [
        (slow, "σ² = 0.1 Var, replay", {}),
        (slow, "σ² = 0.04 Var, replay", {"init_fraction": 0.04}),
        (slow, "σ² = 0.01 Var, replay", {"init_fraction": 0.01}),
        (slow, "σ = 0, replay", {"init_fraction": 0.0}),
        (light, "as it is", {}),
        (vmp + ":imagenet", "over mirror images", mirror),
        ("roid:imagenet", "over mirror images", mirror),
    ]
    found = [Trial(name, "resnet50_v1", change, method) for method, name, change in large]
    found += [Trial(name, "resnext29", change, method) for method, name, change in both]
    return found + [Trial(name, "wrn40_2", change, method) for method, name, change in both + one]


def run(
    trial: Trial, net: nn.Module, images: Tensor, labels: Tensor, preprocess: Preprocess, device: torch.device
) -> dict[str, Any]:
    """Return the scores of a stream, and its seconds."""
    torch.manual_seed(trial.seed)
    seeded = {"seed": trial.seed} if trial.method.startswith("undrift") else {}

    def camera() -> Iterator[Tensor]:
        for domain in images:
            for batch in domain.split(NETWORKS[trial.network].batch):
                yield preprocess.normalise(batch.to(device))

    begun = time.perf_counter()
    with quickly(device, device.type == "cuda"):
        generator = torch.Generator().manual_seed(trial.seed)
        stream = undrift.stream(
            net, camera(), method=trial.method, generator=generator, preprocess=preprocess, **trial.settings, **seeded
        )
        probs = torch.cat([answer.probs for answer in stream]).float().cpu()
    truth = labels.repeat(len(images))
    wait(device)
    seconds = time.perf_counter() - begun
    stream.remove()
    scores, wrong = scored(probs, truth), (probs.argmax(1) != truth).float().view(len(images), -1).mean(1)
    return {
        "images": images.shape[1],
        "error": scores.error,
        "by domain": [round(float(value), 4) for value in wrong],
        "nll": scores.nll,
        "ece": scores.ece,
        "aurc": scores.aurc,
        "events": [str(event) for event in stream.report.events][:5],
        "seconds": round(seconds, 1),
    }


def worker(asked: argparse.Namespace, left: Any, found: Any) -> None:
    """Run one trial after another of those that are left, and put what came of each into a queue."""
    torch.set_num_threads(asked.threads)
    device = torch.device(asked.device)
    held: dict[str, tuple[Tensor, Tensor]] = {}

    def record(trial: Trial) -> dict[str, Any]:
        try:
            if trial.network not in held:
                held[trial.network] = development(trial.network, asked, device)
            net = network(trial.network, asked).to(device).eval()
            if device.type == "cuda":
                net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
                by_pass(net, NETWORKS[trial.network].batch)
            preprocess = RAW if asked.tiny else zoo.preprocess(trial.network)
            return run(trial, net, *held[trial.network], preprocess, device)
        except Exception as error:  # one trial that fails stops no other
            return {"failed": f"{type(error).__name__}: {error}"}

    while (trial := left.get()) is not None:
        found.put((trial.key, record(trial)))
    found.put(None)


def network(name: str, asked: argparse.Namespace) -> nn.Module:
    """Return a source network."""
    if asked.tiny:
        return tiny_network().load(Request())
    return zoo.load(name, asked.data / NETWORKS[name].file)


def development(name: str, asked: argparse.Namespace, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the images of each domain (bytes), and their labels."""
    if asked.tiny:
        clean, labels = tiny_data(Request()).images, torch.arange(12) % 4
    else:
        source = NETWORKS[name]
        count = min(asked.images, source.images)
        domain = source.data(asked.data / Path(source.file).parent).select(range(count))
        domain = domain.hold("cpu") if isinstance(domain, FileDomain) else domain
        clean, labels = domain.images, domain.labels
    made = []
    for corruptions in DOMAINS[: NETWORKS[name].domains]:
        images = clean.to(device)
        for corruption, severity in corruptions:
            images = corrupt(images, corruption, severity)
            images = images if images.dtype == torch.uint8 else (255 * images).round().byte()
        made.append(images)
    return torch.stack(made), labels


def page(result: Mapping[str, Any]) -> str:
    """Return what was found as Markdown: a table for each network, means over seeds, the least error first."""
    groups: dict[str, dict[tuple[str, str], list[dict[str, Any]]]] = {}
    for key, record in result["trials"].items():
        network, method, name = re.fullmatch(r"(\w+): ([\w:-]+), (.*), seed \d+", key).groups()  # type: ignore[union-attr]
        if "failed" not in record:
            groups.setdefault(network, {}).setdefault((method, name), []).append(record)

    def mean(records: list[dict[str, Any]], what: str, times: float = 1) -> float:
        return times * statistics.fmean(record[what] for record in records)

    parts = []
    for network in sorted(groups, reverse=True):
        lines = ["| method | change | images | error % | NLL | ECE % | AURC × 100 | seeds |", "|---|---|" + "---:|" * 6]
        found = groups[network]
        for (method, name), own in sorted(found.items(), key=lambda group: mean(group[1], "error")):
            numbers = [mean(own, "error", 100), mean(own, "nll"), mean(own, "ece", 100), mean(own, "aurc", 100)]
            cells = (method, name, f"{own[0]['images']:,}", *(f"{number:.2f}" for number in numbers), str(len(own)))
            lines.append(f"| {' | '.join(cells)} |")
        source = NETWORKS[network]
        about = f"**{source.title}, {source.domains} development domains, batches of {source.batch}.**"
        parts.append("\n".join([about, "", *lines]))
    machine_of = f"{result['hardware']}; torch {result['torch']}; {result['date']}; bfloat16."
    return "\n\n".join([*parts, machine_of])


def main() -> None:
    """Run what is not finished, in several processes, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--images", type=int, default=IMAGES, help="of each domain")
    parser.add_argument("--jobs", type=int, default=8, help="processes")
    parser.add_argument("--threads", type=int, default=1, help="of a CPU, for each process")
    parser.add_argument("--only", default="", help="part of a trial's name")
    parser.add_argument("--tiny", action="store_true", help="a small random network; nothing is written")
    parser.add_argument("--table", action="store_true", help="print what was found, run nothing")
    asked = parser.parse_args()
    place = asked.results / "recipe_trials.json"
    head = machine(torch.device(asked.device)) | {"domains": DOMAINS}
    result: dict[str, Any] = {**head, "trials": {}}
    if place.is_file() and not asked.tiny:
        result = json.loads(place.read_text())
    if not asked.table:
        done = {key for key, record in result["trials"].items() if "failed" not in record}
        asked.left = [trial for trial in trials() if trial.key not in done and asked.only in trial.key]
        go(asked, result, place)
    print(page(result))
    for key, record in result["trials"].items():
        if "failed" in record:
            print(f"{key}: {record['failed']}")


def go(asked: argparse.Namespace, result: dict[str, Any], place: Path) -> None:
    """Run the trials that are left; the record is written as each ends."""
    context = multiprocessing.get_context("spawn")
    left, found = context.SimpleQueue(), context.SimpleQueue()
    jobs = min(asked.jobs, max(1, len(asked.left)))
    for trial in [*asked.left, *[None] * jobs]:
        left.put(trial)
    processes = [context.Process(target=worker, args=(asked, left, found)) for _ in range(jobs)]
    begun = time.perf_counter()
    for process in processes:
        process.start()
    running = jobs
    while running:
        got = found.get()
        if got is None:
            running -= 1
            continue
        key, record = got
        result["trials"][key] = record
        said = record.get("failed") or f"error {100 * record['error']:.2f} %, {record['seconds']:.0f} s"
        print(f"{time.perf_counter() - begun:4.0f} s  {key}: {said}", flush=True)
        if not asked.tiny:
            place.parent.mkdir(parents=True, exist_ok=True)
            write_text(place, json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    for process in processes:
        process.join()


if __name__ == "__main__":
    main()
