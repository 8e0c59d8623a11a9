"""Claim: `undrift.stream(net, camera)` with nothing else is never worse than the network it started from.

WRN-40-2 on CIFAR-10-C, severity 5, 1,000 images of each corruption, continual; every line of `LINES` is a stream that
ruins some method: few images at a time, classes in runs, mixed domains, nothing to adapt to, constant images, 20
cycles, a domain that jumps with every batch, unbalanced labels. Beside it the source network, norm statistics, Tent,
ROID, CoTTA (8 views), a teacher on a balanced memory of 128 images (RoTTA-like), `undrift-light`, and `undrift`
without its guard, and as it was before, by each batch's statistics.

The bar, for `undrift` and the error after the first 1,000 images: at most the source's + 1 point in every line (clean
images: + 0.5), and in the ordinary stream (batches of 200) at most 0.3 points above itself without the guard.

The rule by which constants were chosen, on the development corruptions (--development: speckle noise, Gaussian blur,
saturate, and clean images) and never on the fifteen:

- N₀ (8, 16 or 32): the least mean error of norm statistics alone over batches of 1, 4, 16 and 64; ties of 0.3 points
  go to 16, which is published.
- What images are worth at most, and the slack of chance: no value that makes a batch of the same domain be forgotten.
- Doubt: the least factor (of 1.25, 1.5, 2) at which no ordinary batch of 64 is taken for a run of a class.
- The guard's factor: the next one up; it must never act on a healthy stream.
- What a memory of runs takes, and when it makes a step, at severities 5 and 3, in batches of 200: the bar holds in runs
  of 1,000, and runs of 200 lose a point at most; of what does both, the least code. No memory at all loses more than a
  point. A memory of all images fills with mistakes in a long run, and the network with it. That of a batch's most
  frequent class, with steps from four classes on, was taken, without a look at the memory's own views before a step. On
  development images runs of 200 were run in part (four of seven domains), and of runs of 1,000 the first nine batches.
- Seen on 200 images of each development corruption: `undrift` by each batch's statistics 12.2 % error in the ordinary
  stream. A first form compared with the statistics of the domain before where the domain had changed; it took the new
  domain for a run of a class, and had 39.8 %.

Predicted: all lines hold for `undrift`; Tent and ROID fail at batches of 1, 4 and 16 and in runs, CoTTA too; single
images cost `undrift` five points against batches of 200; the guard acts in no line.

Command:   python benchmarks/unattended.py --data ../shared/data --device cuda --jobs 6 [--bf16]
           python benchmarks/unattended.py --data ../shared/data --lines "batches of 1" "batches of 4" --images 200
           python benchmarks/unattended.py --device cpu --jobs 1 --bf16 --again --rows undrift --lines "runs of 1,000"
           python benchmarks/unattended.py --again --rows undrift     what is finished, too
           python benchmarks/unattended.py --list                     lines, rows, and how long each takes
           python benchmarks/unattended.py --table                    print what was found
           python benchmarks/unattended.py --tiny                     does everything run?
Output:    unattended.json under --results, trial by trial; a finished trial is not run again.
Seeds:     0.
"""

import argparse
import json
import math
import os
import time
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn

import undrift
from undrift.images.corrupt import CORRUPTIONS, DEVELOPMENT, corrupt
from undrift.system.atomic import write_text
from undrift_bench import zoo
from undrift_bench.bench.harness.measure import machine, wait
from undrift_bench.bench.harness.networks import tiny_data, tiny_network
from undrift_bench.bench.harness.quickly import by_pass, quickly
from undrift_bench.bench.harness.request import Request
from undrift_bench.data import cifar10

NETWORK = "cifar10/wrn40_2.safetensors"
MARKS = ("", "* ", "** ", "*** ")
"""Of trials on the machine that made most of them, and on others."""
LEFT_OUT = 1000
"""Images at the start that the bar leaves out."""

ROWS: dict[str, dict[str, Any]] = {
    "source": {"method": "source"},
    "norm-stats": {"method": "norm-stats"},
    "tent": {"method": "tent"},
    "roid": {"method": "roid"},
    "cotta": {"method": "cotta", "views": 8},
    "rotta-like": {
        "method": "undrift-light",
        "prior_images": 0,
        "guard": False,
        "gather": 128,
        "balanced": True,
        "memory": 20_000,
        "most_views": None,
        "certainty": 0.0,
    },
    "undrift": {},
    "undrift-light": {"method": "undrift-light"},
    "undrift, no guard": {"guard": False},
    "undrift, batch statistics": {"prior_images": 0, "guard": False},
}
ORDINARY = ("undrift, no guard", "undrift, batch statistics")
"""Rows of the ordinary stream alone, unless they are named: they say what the rest costs there."""

COST = {
    "source": 1.0,
    "norm-stats": 1.0,
    "tent": 3.0,
    "roid": 7.0,
    "cotta": 14.0,
    "rotta-like": 9.0,
    "undrift": 17.0,
    "undrift-light": 10.0,
    "undrift, no guard": 16.0,
    "undrift, batch statistics": 14.0,
}
"""Forward passes per image, about; a backward pass is two."""


@dataclass(frozen=True)
class Line:
    """A stream: which images come in what order, and how many at a time."""

    name: str
    batch: int = 200
    cycles: int = 1


LINES = (
    *(Line(f"batches of {size}", size) for size in (200, 64, 16)),
    Line("runs of 200"),
    Line("runs of 1,000"),
    Line("mixed"),
    Line("clean"),
    Line("constant images", 64),
    Line("jumps"),
    Line("unbalanced"),
    Line("20 cycles", cycles=20),
    *(Line(f"batches of {size}", size) for size in (4, 1)),
)


def order(line: Line, labels: Tensor, domains: int, images: int) -> Tensor:
    """Return the places of a line's images, domain after domain: `domain * len(labels) + image`."""
    generator = torch.Generator().manual_seed(0)
    pool = len(labels)
    shuffled = torch.randperm(pool, generator=generator)
    first = shuffled[:images]
    by_class = [shuffled[labels[shuffled] == c] for c in range(int(labels.max()) + 1)]

    def run(number: int, length: int) -> Tensor:
        found = by_class[number % len(by_class)]
        return found[torch.arange(length) % len(found)]

    def domain(number: int) -> Tensor:
        if line.name.startswith("runs of"):
            length = min(int(line.name.split()[-1].replace(",", "")), images)
            each = -(-images // length)
            chosen = torch.cat([run(number * each + part, length) for part in range(each)])[:images]
        elif line.name == "unbalanced":  # the rarest class is a hundredth of the most frequent one
            share = torch.logspace(0, -2, len(by_class))
            counts = (images * share / share.sum()).round().long().tolist()
            chosen = torch.cat([run(c, count) for c, count in enumerate(counts)])
            chosen = chosen[torch.randperm(len(chosen), generator=generator)]
        else:
            chosen = first
        return chosen + number * pool

    if line.name == "clean":  # the last domain
        return shuffled[: domains * images] + domains * pool
    found = torch.cat([domain(number) for number in range(domains)])
    if line.name == "mixed":
        found = found[torch.randperm(len(found), generator=generator)]
    if line.name == "jumps":
        parts = found.view(domains, -1)
        batches = [part.split(line.batch) for part in parts]
        found = torch.cat([batches[d][b] for b in range(len(batches[0])) for d in range(domains)])
    return found.repeat(line.cycles)


def run(
    row: str, line: Line, net: nn.Module, images: Tensor, labels: Tensor, asked: argparse.Namespace
) -> dict[str, Any]:
    """Return the errors of a stream, what it decided, and its seconds."""
    torch.manual_seed(0)
    device = torch.device(asked.device)
    places = order(line, labels, len(images) // len(labels) - 1, asked.images)
    right: list[Tensor] = []
    settings = dict(ROWS[row])
    begun = time.perf_counter()

    def camera() -> Any:
        for part in places.split(line.batch):
            batch = images[part].to(device).float() / 255
            if line.name == "constant images":
                batch[0] = 0.5
            yield batch

    with quickly(device, asked.bf16), warnings.catch_warnings():
        warnings.simplefilter("ignore", undrift.UndriftWarning)
        if asked.bf16 and device.type == "cuda":
            by_pass(net, line.batch)
        going = undrift.stream(net, camera(), generator=torch.Generator().manual_seed(0), **settings)
        for part, prediction in zip(places.split(line.batch), going, strict=True):
            hits = (prediction.label.cpu() == labels[part % len(labels)]).float()
            if line.name == "constant images":
                hits[0] = math.nan
            right.append(hits)
    wait(device)
    seconds = time.perf_counter() - begun
    wrong = 1 - torch.cat(right)
    events = [str(event) for event in going.report.events if event.kind != "domain changed"]
    changes = sum(event.kind == "domain changed" for event in going.report.events)
    return {
        "error": float(wrong.nanmean()),
        "error_after": float(wrong[LEFT_OUT:].nanmean()) if len(wrong) > LEFT_OUT else None,
        "images": len(wrong),
        "events": events[:20],
        "domain_changes": changes,
        "steps": going.report.steps,
        "seconds": round(seconds, 1),
        **machine(device),
        "bf16": asked.bf16,
    }


def worker(jobs: Any, asked: argparse.Namespace, images: Tensor, labels: Tensor, found: Any) -> None:
    """Run trials until none is left, and put what came of each into a queue."""
    torch.set_num_threads(asked.threads)
    device = torch.device(asked.device)
    while (job := jobs.get()) is not None:
        row, line = job
        try:
            net = network(asked).to(device).eval()
            if device.type == "cuda" or asked.bf16:
                net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            record = run(row, line, net, images, labels, asked)
        except Exception as error:  # one trial that fails stops no other
            record = {"failed": f"{type(error).__name__}: {error}"}
        found.put((key_of(row, line), record))
    found.put(None)


def key_of(row: str, line: Line) -> str:
    """Return a trial's name in the record."""
    return f"{line.name}: {row}"


def network(asked: argparse.Namespace) -> nn.Module:
    """Return the source network."""
    return tiny_network().load(Request()) if asked.tiny else zoo.load("wrn40_2", asked.data / NETWORK)


def data(asked: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Return every corruption's images (bytes), then the clean ones, and the labels of one domain."""
    if asked.tiny:
        clean, labels = tiny_data(Request()).images, torch.arange(12) % 4
    else:
        domain = cifar10(asked.data / "cifar10")
        clean, labels = domain.images, domain.labels
        if "runs of 200" not in asked.lines and "runs of 1,000" not in asked.lines and "unbalanced" not in asked.lines:
            # The images that `order` takes, and enough clean ones.
            shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
            few = shuffled[: max(asked.images, len(domains(asked)) * asked.images if "clean" in asked.lines else 0)]
            clean, labels = clean[few], labels[few]
    device = torch.device(asked.device)
    made = []
    for name, severity in domains(asked):
        # In parts: some corruptions hold much at a time.
        parts = [corrupt(part.to(device), name, severity) for part in clean.split(2000)]
        made += [(p if p.dtype == torch.uint8 else (255 * p).round().byte()).cpu() for p in parts]
    made.append(clean if clean.dtype == torch.uint8 else (255 * clean).round().byte())
    return torch.cat(made), labels


def domains(asked: argparse.Namespace) -> list[tuple[str, int]]:
    """Return the corruptions of the streams and their severities, in order."""
    if asked.development:
        return [(name, severity) for severity in (5, 3) for name in DEVELOPMENT]
    return [(name, 5) for name in CORRUPTIONS]


def estimate(row: str, line: Line, asked: argparse.Namespace) -> float:
    """Return about how many seconds a trial takes: passes over images, and the launches of every pass."""
    images = 15 * asked.images * line.cycles
    # One H200 with six processes: 5 ms to launch a pass, 10,000 images a second. One CPU core: 150 images a second, or
    # 400 in bfloat16.
    if asked.device != "cpu":
        steps = images / line.batch if line.batch >= 64 or not row.startswith("undrift") else images / line.batch / 3
        return COST[row] * (0.005 * steps + images / 60_000)
    return COST[row] * images / (400 if asked.bf16 else 150)


def table(result: Mapping[str, Any], events: bool = True) -> str:
    """Return errors after the first images as a Markdown table, and which bars hold."""
    rows = list(ROWS)
    made = Counter(made_on(record) for record in result["trials"].values() if "failed" not in record)
    marks = dict(zip((what for what, _ in made.most_common()), MARKS, strict=False))
    lines = [f"| error % after the first {LEFT_OUT:,} | {' | '.join(rows)} |", "|---" * (len(rows) + 1) + "|"]
    said = []
    for line in LINES:
        found = {row: result["trials"].get(key_of(row, line), {}) for row in rows}
        after = {row: r.get("error_after") or r.get("error") for row, r in found.items()}
        if all(error is None for error in after.values()):
            continue
        mark = {row: marks[made_on(record)] for row, record in found.items() if after[row] is not None}
        cells = (f"{100 * e:.1f}{mark[row]}" if (e := after[row]) is not None else "–" for row in rows)
        lines.append(f"| {line.name} | {' | '.join(cells)} |")
        source, ours, bare = after["source"], after["undrift"], after["undrift, no guard"]
        if source is not None and ours is not None:
            allowed = source + (0.005 if line.name == "clean" else 0.01)
            said.append(f"- {line.name}: {'holds' if ours <= allowed else 'MISSED'} ({100 * (ours - source):+.1f})")
        if line.name == "batches of 200" and ours is not None and bare is not None:
            held = "holds" if ours <= bare + 0.003 else "MISSED"
            said.append(f"- cost of the guard in the ordinary stream: {held} ({100 * (ours - bare):+.2f})")
        if events:
            said += [
                f"- {line.name}, {row}: {'; '.join(r['events'][:5])}" for row, r in found.items() if r.get("events")
            ]
        said += [f"- {line.name}, {row}: {r['failed']}" for row, r in found.items() if "failed" in r]
    return "\n".join([*lines, "", *said])


def made_on(record: Mapping[str, Any]) -> str:
    """Return which machine made a trial, and with what."""
    return f"{record['hardware']}, torch {record['torch']}{', bfloat16' if record['bf16'] else ''}"


def page(result: Mapping[str, Any]) -> str:
    """Return the table, and which bars hold, for the docs."""
    made = Counter(made_on(record) for record in result["trials"].values())
    said = [f"{MARKS[place]}{what}" for place, (what, _) in enumerate(made.most_common())]
    whole = table(result, events=False)
    return f"{whole}\n\n({'; '.join(said)}; {result['images']:,} images per corruption, seed 0.)"


def main() -> None:
    """Run what is not finished, in several processes, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--images", type=int, default=1000, help="of each corruption")
    parser.add_argument("--jobs", type=int, default=6, help="processes")
    parser.add_argument("--threads", type=int, default=1, help="of a CPU, for each process")
    parser.add_argument("--lines", nargs="+", default=[line.name for line in LINES], metavar="LINE")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), metavar="ROW")
    parser.add_argument("--bf16", action="store_true", help="convolutions in bfloat16")
    parser.add_argument("--development", action="store_true", help="the corruptions that constants are chosen on")
    parser.add_argument("--again", action="store_true", help="run finished trials of the named lines and rows anew")
    parser.add_argument("--list", action="store_true", help="say what there is to run, and about how long it takes")
    parser.add_argument("--tiny", action="store_true", help="a small random network; nothing is written")
    parser.add_argument("--table", action="store_true", help="print what was found, run nothing")
    asked = parser.parse_args()
    known = {line.name for line in LINES}
    if wrong := [n for n in (*asked.lines, *asked.rows) if n not in known and n not in ROWS]:
        parser.error(f"{', '.join(wrong)}: neither a line nor a row; --list says what there is")
    if asked.tiny:
        asked.images = 12
    place = asked.results / ("unattended-development.json" if asked.development else "unattended.json")
    if asked.images != 1000:
        place = place.with_stem(f"{place.stem}-{asked.images}")
    result: dict[str, Any] = {"images": asked.images, "trials": {}}
    if place.is_file() and not asked.tiny:
        result = json.loads(place.read_text())
    if asked.again:
        again = {f"{line}: {row}" for line in asked.lines for row in asked.rows}
        result["trials"] = {key: record for key, record in result["trials"].items() if key not in again}
    done = {key for key, record in result["trials"].items() if "failed" not in record}
    left = [(row, line) for line in LINES for row in ROWS if line.name in asked.lines and row in asked.rows]
    left = [(r, n) for r, n in left if r not in ORDINARY or n is LINES[0] or len(asked.rows) < len(ROWS)]
    left = [(row, line) for row, line in left if key_of(row, line) not in done]
    if asked.list:
        for line in LINES:
            mine = {row: estimate(row, line, asked) for row, its in left if its is line}
            each = ", ".join(f"{row} {seconds:.0f}" for row, seconds in mine.items())
            print(f"{line.name}: {sum(mine.values()):.0f} s in one process ({each})")
        total = sum(estimate(row, line, asked) for row, line in left)
        print(f"all: {total:.0f} s, about {total / max(1, asked.jobs):.0f} s in {asked.jobs} processes")
        return
    if not asked.table and left:
        # The longest first, so that no process is left alone with one.
        go(asked, sorted(left, key=lambda job: -estimate(*job, asked)), result, place)
    print(table(result))


def go(asked: argparse.Namespace, left: list[tuple[str, Line]], result: dict[str, Any], place: Path) -> None:
    """Run the trials that are left; the record is written as each ends."""
    images, labels = data(asked)
    # What oneDNN has for newer processors crashes on some virtual ones.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    context = multiprocessing.get_context("spawn")
    jobs, found = context.SimpleQueue(), context.SimpleQueue()
    running = min(asked.jobs, len(left))
    for job in (*left, *(None for _ in range(running))):
        jobs.put(job)
    begun = time.perf_counter()
    processes = [
        context.Process(target=worker, args=(jobs, asked, images.share_memory_(), labels.share_memory_(), found))
        for _ in range(running)
    ]
    for process in processes:
        process.start()
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
