"""Claim: a stream's memory is flat: after the first 1,000 batches of 100,000 its resident set grows by 2 % at most.

A tiny network and batches of eight random images of 8 × 8, so that there are many batches. The state is taken and
written every 1,000 batches, `stream.health` is read every 500, one image in 500 holds NaN, and the domain changes
every 3,000 batches. Each method runs in a process of its own. Growth is that of the mean of the last tenth of points
over the mean of those from 1,000 to 2,000 batches: single points move by what the allocator gives back.

Predicted: growth below 1 %, and a state file that grows by a kilobyte while the report's lists of places fill.

Command:   python benchmarks/soak.py [--methods undrift tent] [--batches 100000] [--minutes 8]
           python benchmarks/soak.py --table
Hardware:  Linux (reads /proc/self/statm); one core.
Seeds:     0.
Output:    soak.json and soak.png under --results, and a table on the terminal.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import undrift
from undrift.system.atomic import write_bytes, write_text
from undrift_bench.bench.harness.measure import machine

BATCH, STATES, ESTIMATES, DOMAIN, BROKEN, POINTS = 8, 1000, 500, 3000, 500, 200
SETTLED, BAR = 1000, 0.02


def network() -> nn.Module:
    """Return the tiny network."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    return nn.Sequential(*first, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).eval()


def camera(batches: int) -> Iterator[Tensor]:
    """Yield random images of domains of different brightness; some hold NaN."""
    generator = torch.Generator().manual_seed(0)
    for number in range(batches):
        images = torch.rand(BATCH, 3, 8, 8, generator=generator) * (1 + number // DOMAIN % 5) / 5
        if number % (BROKEN // BATCH) == 0:
            images[0, 0, 0, 0] = torch.nan
        yield images


def resident() -> float:
    """Return the memory of this process in megabytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def soak(method: str, batches: int, minutes: float, every: int) -> dict[str, Any]:
    """Return memory by batch, the sizes of the state file, and the pace."""
    torch.set_num_threads(1)
    begun, memory, sizes = time.perf_counter(), list[tuple[int, float]](), list[int]()
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "state"
        going = undrift.stream(network(), camera(batches), method=method, generator=torch.Generator().manual_seed(0))
        for number, answer in enumerate(going, 1):
            assert len(answer) == BATCH
            if number % STATES == 0:
                with tempfile.TemporaryFile() as file:
                    torch.save(going.state_dict(), file)
                    file.seek(0)
                    sizes.append(write_bytes(state, file.read()))
            if number % ESTIMATES == 0:
                assert going.health is not None
            if number % every == 0:
                memory.append((number, resident()))
            if time.perf_counter() - begun > 60 * minutes:
                break
    seconds = time.perf_counter() - begun
    return {"batches": number, "seconds": round(seconds, 1), "memory_mb": memory, "state_bytes": sizes}


def worker(queue: Any, *given: Any) -> None:
    """Put what `soak` returns into a queue."""
    queue.put(soak(*given))


def growth(record: Mapping[str, Any]) -> float:
    """Return by which part memory grew."""
    points = record["memory_mb"]
    first = [mb for batch, mb in points if SETTLED <= batch <= 2 * SETTLED]
    last = [mb for _, mb in points[-max(1, len(points) // 10) :]]
    return statistics.fmean(last) / statistics.fmean(first) - 1


def table(result: Mapping[str, Any]) -> str:
    """Return what was found as Markdown."""
    lines = ["| method | batches | MB after 1,000 | MB at the end | growth | largest state | ms a batch |"]
    lines += ["|---|" + "---:|" * 6]
    for method, record in result["methods"].items():
        first = next(mb for batch, mb in record["memory_mb"] if batch >= SETTLED)
        numbers = (f"{record['batches']:,}", f"{first:.1f}", f"{record['memory_mb'][-1][1]:.1f}")
        found = growth(record)
        grown = f"{100 * found:+.2f} %{'' if found <= BAR else ' (missed)'}"
        more = (f"{max(record['state_bytes']) / 1e3:.0f} kB", f"{1e3 * record['seconds'] / record['batches']:.2f}")
        lines.append(f"| {' | '.join((method, *numbers, grown, *more))} |")
    return "\n".join(lines)


def plot(result: Mapping[str, Any], place: Path) -> None:
    """Draw memory over batches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.add_subplot()
    for method, record in result["methods"].items():
        batches, memory = zip(*record["memory_mb"], strict=True)
        axes.plot(batches, memory, label=method)
    axes.set(xlabel="batches", ylabel="resident memory, MB", ylim=(0, None))
    axes.legend()
    figure.savefig(place, dpi=120)


def main() -> None:
    """Run each method in a process of its own, write soak.json and soak.png."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--methods", nargs="+", default=["undrift", "tent"])
    parser.add_argument("--batches", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, default=8, help="of each method, at most")
    parser.add_argument("--table", action="store_true", help="print what was found, run nothing")
    asked = parser.parse_args()
    place = asked.results / "soak.json"
    result: dict[str, Any] = json.loads(place.read_text("utf-8")) if place.is_file() else {"methods": {}}
    if not asked.table:
        context = multiprocessing.get_context("spawn")
        for method in asked.methods:
            queue = context.SimpleQueue()
            every = max(1, min(asked.batches // POINTS, SETTLED // 4))
            process = context.Process(target=worker, args=(queue, method, asked.batches, asked.minutes, every))
            process.start()
            result["methods"][method] = queue.get() | machine(torch.device("cpu"))
            process.join()
            write_text(place, json.dumps(result, ensure_ascii=False) + "\n")
        plot(result, asked.results / "soak.png")
    print(table(result))


if __name__ == "__main__":
    main()
