"""Question: which mean, which σ and which replay should `undrift` have in a stream?

WRN-40-2 on CIFAR-10 and ResNeXt-29 on CIFAR-100; the development corruptions (speckle noise, Gaussian blur, saturate;
severity 5), one after another, three times, never reset; never the fifteen that results are reported on. Each trial is
`undrift` with what its line of `trials` changes. Beside it `undrift` itself and its σ = 0 twin, with three seeds (of
noise and random choices), which say how far one recipe is from itself.

The rule, written before anything ran, for both networks and the error over the whole stream. "Better" and "worse" are
by 0.2 points of error or more on the mean of both networks:

- mean: the least rank whose better start and step are not worse than the free mean by more than 0.3 points on either
  network becomes the default, as it makes packs small; else the mean stays free, and the page says what ranks cost.
- replay becomes the default if it is better.
- σ stays a fixed fraction of Var(kernel) unless learning it, or the natural gradient's fixed point, is better.

Predicted: rank 64 loses half a point and rank 8 two; the gradient's directions are better than the kernel's at rank 8
and no different at 64; the larger step is worse. Replay changes the error by less than 0.1 and lowers the ECE. Learning
σ changes nothing, the fixed point loses a point.

Command:   python benchmarks/recipe_trials.py --data ../shared/data --device cuda --jobs 6      one GPU: under 150 s
           python benchmarks/recipe_trials.py --tiny                                            does everything run?
           python benchmarks/recipe_trials.py --table                                           print what was found
Output:    recipe-trials.json under --results, trial by trial; a finished trial is not run again.
Seeds:     0 to 2 for `undrift` and its twin, 0 for the others.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn

import undrift
from undrift import methods
from undrift._types import Keeper
from undrift.images import Preprocess
from undrift.images.corrupt import DEVELOPMENT, corrupt
from undrift.images.preprocess import RAW
from undrift.judge import metrics, selective
from undrift.posterior.prior import prior_row
from undrift.system.atomic import write_text
from undrift_bench import zoo
from undrift_bench.bench.harness.measure import machine, wait
from undrift_bench.bench.harness.networks import tiny_data, tiny_network
from undrift_bench.bench.harness.quickly import by_pass, quickly
from undrift_bench.bench.harness.request import Request
from undrift_bench.data import cifar10, cifar100

BATCH, CYCLES, IMAGES = 200, 3, 3000
NETWORKS = {
    "wrn40_2": (cifar10, "cifar10/wrn40_2.safetensors"),
    "resnext29": (cifar100, "cifar100/resnext29.safetensors"),
}
STEP = 0.03  # undrift's own, in deviations of a weight


class FixedPoint(Keeper):
    """Put each σ where a step of the natural gradient would leave it: 1/σ² = 1/prior + N·h.

    h = 2 (∂L/∂ln σ²) / (σ² · weights) is the mean curvature of a kernel's weights; it is averaged over steps.
    """

    def __init__(self, count: float, memory: float = 0.95) -> None:
        self.count, self.memory = count, memory
        self._curvature: Tensor | None = None
        self._images = 0

    @torch.no_grad()
    def gradients(self, model: undrift.Perturbed) -> None:
        """Move the log-variances; their own rate is 0."""
        self._images += BATCH
        noises = [noise for noise in model.noises() if noise.log_var.grad is not None]
        log_prior, half_weights = prior_row(noises)
        log_var = torch.cat([noise.log_var.flatten() for noise in noises])
        grad = torch.cat([noise.log_var.grad.flatten() for noise in noises if noise.log_var.grad is not None])
        of_kl = half_weights * ((log_var - log_prior).exp() - 1) * model.options.kl_weight / self._images
        curvature = (grad - of_kl) / (log_var.exp() * half_weights)
        old = self._curvature
        self._curvature = curvature if old is None else torch.lerp(curvature, old, self.memory)
        found = -((-log_prior).exp() + self.count * self._curvature.clamp_min(0)).log()
        for noise, row in zip(noises, found.split([n.log_var.numel() for n in noises]), strict=True):
            noise.log_var.copy_(row.view_as(noise.log_var))


@dataclass(frozen=True)
class Trial:
    """One stream: a network, what is changed of `undrift`, and a seed."""

    name: str
    network: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    fixed_point: float = 0.0
    seed: int = 0

    @property
    def key(self) -> str:
        """Its name in the record."""
        return f"{self.network}: {self.name}, seed {self.seed}"


def trials() -> list[Trial]:
    """Return every trial; those that decide most come first, and the slower network before the other."""
    found = []
    for network in reversed(NETWORKS):
        found += [Trial("undrift", network, seed=seed) for seed in range(3)]
        found += [Trial("σ = 0", network, {"init_fraction": 0.0}, seed=seed) for seed in range(3)]
        found += [Trial("frozen mean", network, {"mean_rank": 0})]
        found += [Trial("replay", network, {"replay": 1000})]
        # σ learned by Adam; 20 times the rate, as ln σ² has to move by more than a weight does.
        found += [Trial("σ learned", network, {"log_var_lr_scale": 20.0})]
        found += [Trial(f"σ by the fixed point, N = {count:,}", network, {}, count) for count in (1000, 10_000)]
        ranks = (8, 16, 32, 64) if network == "wrn40_2" else (8, 64)
        for rank in ranks:
            for start in ("kernel", "gradient"):
                for step in (STEP, 0.1):
                    change = {"mean_rank": rank, "mean_start": start, "weights_lr": step}
                    found.append(Trial(f"rank {rank}, {start}'s directions, step {step}", network, change))
    return found


def run(
    trial: Trial, net: nn.Module, images: Tensor, labels: Tensor, preprocess: Preprocess, device: torch.device
) -> dict[str, Any]:
    """Return the scores of a stream, the size of its file, and its seconds."""
    torch.manual_seed(trial.seed)
    count = len(labels) // len(DEVELOPMENT)
    parts = methods.get("undrift", "stream").build({**trial.settings, "seed": trial.seed})
    model = undrift.perturb(net, parts.options, generator=torch.Generator().manual_seed(trial.seed))
    keepers = [FixedPoint(trial.fixed_point)] if trial.fixed_point else []

    def camera() -> Iterator[Tensor]:
        for _ in range(CYCLES):
            for domain in images.split(count):
                for batch in domain.split(BATCH):
                    yield preprocess.normalise(batch.to(device))

    begun = time.perf_counter()
    with quickly(device, device.type == "cuda"):
        answers = list(undrift.stream(model, camera(), parts.likelihood, keepers=keepers))
    probs = torch.cat([answer.probs for answer in answers]).float().cpu()
    truth = labels.repeat(CYCLES)
    wait(device)
    seconds = time.perf_counter() - begun
    confidence, right = probs.amax(1), probs.argmax(1) == truth
    with tempfile.TemporaryDirectory() as folder:
        size = undrift.save(model, Path(folder) / "domain.safetensors")
    model.remove()
    return {
        "error": metrics.error(probs, truth),
        "nll": metrics.nll(probs, truth),
        "ece": metrics.ece(probs, truth),
        "aurc": selective.aurc(confidence, right),
        "file_bytes": size,
        "seconds": round(seconds, 1),
    }


def worker(number: int, jobs: int, asked: argparse.Namespace, found: Any) -> None:
    """Run every jobs-th of the trials that are left, and put what came of each into a queue."""
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
                by_pass(net, BATCH)
            preprocess = RAW if asked.tiny else zoo.preprocess(trial.network)
            return run(trial, net, *held[trial.network], preprocess, device)
        except Exception as error:  # one trial that fails stops no other
            return {"failed": f"{type(error).__name__}: {error}"}

    for trial in asked.left[number::jobs]:
        found.put((trial.key, record(trial)))
    found.put(None)


def network(name: str, asked: argparse.Namespace) -> nn.Module:
    """Return a source network."""
    if asked.tiny:
        return tiny_network().load(Request())
    return zoo.load(name, asked.data / NETWORKS[name][1])


def development(name: str, asked: argparse.Namespace, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the images of the three corruptions (bytes), and their labels."""
    if asked.tiny:
        clean, labels = tiny_data(Request()).images, torch.arange(12) % 4
    else:
        domain = NETWORKS[name][0](asked.data / name_of_data(name))
        clean, labels = domain.images[: asked.images], domain.labels[: asked.images]
    made = [corrupt(clean.to(device), corruption, 5) for corruption in DEVELOPMENT]
    made = [each if each.dtype == torch.uint8 else (255 * each).round().byte() for each in made]
    return torch.cat(made), labels.repeat(len(DEVELOPMENT))


def name_of_data(network: str) -> str:
    """Return the folder of a network's data."""
    return Path(NETWORKS[network][1]).parent.name


def table(result: Mapping[str, Any]) -> str:
    """Return what was found as a Markdown table: means over seeds, and the difference to `undrift`'s error."""
    lines = ["| network | trial | error % | − undrift | NLL | ECE % | AURC × 100 | file | seeds |", "|---" * 9 + "|"]
    for name in NETWORKS:
        groups: dict[str, list[dict[str, Any]]] = {}
        for trial in trials():
            record = result["trials"].get(trial.key)
            if trial.network == name and record is not None and "failed" not in record:
                groups.setdefault(trial.name, []).append(record)

        def mean(records: list[dict[str, Any]], what: str, times: float = 1) -> float:
            return times * statistics.fmean(record[what] for record in records)

        base = mean(groups["undrift"], "error", 100) if "undrift" in groups else None
        for trial_name, records in groups.items():
            error = mean(records, "error", 100)
            numbers = (f"{error:.2f}", "–" if base is None else f"{error - base:+.2f}", f"{mean(records, 'nll'):.3f}")
            more = (f"{mean(records, 'ece', 100):.1f}", f"{mean(records, 'aurc', 100):.2f}")
            size = f"{mean(records, 'file_bytes') / 1e6:.2f} MB"
            lines.append(f"| {' | '.join((name, trial_name, *numbers, *more, size, str(len(records))))} |")
    failed = [f"- {key}: {record['failed']}" for key, record in result["trials"].items() if "failed" in record]
    return "\n".join([*lines, *failed])


def main() -> None:
    """Run what is not finished, in several processes, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--images", type=int, default=IMAGES, help="of each corruption")
    parser.add_argument("--jobs", type=int, default=6, help="processes")
    parser.add_argument("--threads", type=int, default=1, help="of a CPU, for each process")
    parser.add_argument("--only", default="", help="part of a trial's name")
    parser.add_argument("--tiny", action="store_true", help="a small random network; nothing is written")
    parser.add_argument("--table", action="store_true", help="print what was found, run nothing")
    asked = parser.parse_args()
    place = asked.results / "recipe-trials.json"
    head = machine(torch.device(asked.device)) | {"images": asked.images, "cycles": CYCLES, "batch": BATCH}
    result: dict[str, Any] = {**head, "trials": {}}
    if place.is_file() and not asked.tiny:
        known = json.loads(place.read_text())
        if asked.table or known["images"] == asked.images:
            result = known
    if not asked.table:
        done = {key for key, record in result["trials"].items() if "failed" not in record}
        asked.left = [trial for trial in trials() if trial.key not in done and asked.only in trial.key]
        go(asked, result, place)
    print(table(result))


def go(asked: argparse.Namespace, result: dict[str, Any], place: Path) -> None:
    """Run the trials that are left; the record is written as each ends."""
    context = multiprocessing.get_context("spawn")
    found = context.SimpleQueue()
    jobs = min(asked.jobs, max(1, len(asked.left)))
    processes = [context.Process(target=worker, args=(number, jobs, asked, found)) for number in range(jobs)]
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
