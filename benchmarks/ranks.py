"""Question: how much of a second core does `adapt` use when two processes share each batch?

`undrift.adapt` with the default method on WRN-40-2: norm statistics first, all means free, neighbours. One process on
one core and two processes on a core each, in turns, on the same images in the same batches. The efficiency is

    time of one / (2 · time of two)

Where other work shares the cores, each of two processes waits for the slower one at every layer, and the clock tells of
that work. So the CPU time is recorded too: that of one over the sum of both is the part of the work that is not spent
on messages or done twice. It does not see waiting.

Beside it two controls. "Apart": both processes adapt at once, each alone and to all images, without a message; what is
lost there is lost to the machine (shared caches and memory, other work), and no joint run can be expected to win it
back. And the largest difference between the weights of the two ways, which are to be one run.

A joint run takes batch statistics by its own code, which on a CPU is quicker than PyTorch's batch norm in train mode:
that may give it back a part of what messages cost, so efficiencies near or above 1 are not all division of labour.

The bar, set before any of it ran: at least 0.9 in the median turn.

Command:   python benchmarks/ranks.py --data ../shared/data/cifar10 [--images 128] [--epochs 1] [--turns 3] [--more]
Hardware:  two idle CPU cores, each process bound to one.
Seeds:     0.
Output:    ranks-IMAGES-EPOCHS.json under --results, with each turn and how busy others kept the cores in it.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, multiprocessing

import undrift
from undrift.system.atomic import write_text
from undrift.system.malloc import keep_freed
from undrift.system.ranks import background_threads
from undrift_bench import zoo
from undrift_bench.bench.harness.measure import machine
from undrift_bench.bench.online.corrupted import development

WAYS = ("one", "two", "apart")
OTHERS = 0.25  # of a core: a turn in which others took more tells of them, and is recorded but not counted


def busy() -> float:
    """Return the seconds that all cores were busy since the start."""
    user, nice, system, _idle, _wait, irq, soft, *_ = map(
        int, Path("/proc/stat").read_text().split("\n")[0].split()[1:]
    )
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


def once(asked: argparse.Namespace, images: Tensor) -> tuple[float, float, dict[str, Tensor], int]:
    """Adapt once; return the seconds, those of CPU time, what was learned, and the bytes of a step."""
    torch.manual_seed(0)
    net = zoo.load("wrn40_2", asked.data / "wrn40_2.safetensors").eval()
    generator = torch.Generator().manual_seed(0)
    begun, spent = time.perf_counter(), time.process_time()
    history = undrift.adapt(
        net, images, epochs=asked.epochs, batch_size=asked.batch, generator=generator, progress=False
    )
    took, spent = time.perf_counter() - begun, time.process_time() - spent
    assert history.model is not None
    return took, spent, {n: t.detach().clone() for n, t in history.model.state_dict().items()}, history.exchanged


def work(rank: int, asked: argparse.Namespace, place: str) -> None:
    """Take part in every turn, and let the first process write what was seen."""
    os.sched_setaffinity(0, {rank})
    torch.set_num_threads(1)
    keep_freed()  # as the command line does
    images, _ = development(asked.data, asked.images, torch.device("cpu"))
    images = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))][: asked.images]
    turns, learned = earlier(asked), dict[str, dict[str, Tensor]]()
    once(asked, images[: asked.batch])  # warm up
    begin = len(turns) // len(WAYS)
    for turn in range(begin, begin + asked.turns):
        for way in WAYS:
            joint = f"file://{place}/{turn}-{way}"
            # A group before each turn: nobody begins while the other still works.
            with background_threads():  # as the command line does
                distributed.init_process_group("gloo", init_method=f"{joint}-before", rank=rank, world_size=2)
            distributed.barrier()
            if way != "two":
                distributed.destroy_process_group()
            before, idle = busy(), way == "one" and rank
            took, spent, learned[way], sent = (0.0, 0.0, {}, 0) if idle else once(asked, images)
            after = busy()
            if way != "two":
                distributed.init_process_group("gloo", init_method=f"{joint}-after", rank=rank, world_size=2)
            found = torch.tensor([took, spent], dtype=torch.float64)
            both = [torch.empty_like(found) for _ in range(2)]
            distributed.all_gather(both, found)
            distributed.destroy_process_group()
            seconds = max(float(each[0]) for each in both)
            others = after - before - sum(float(each[1]) for each in both)
            row = {
                "turn": turn,
                "way": way,
                "seconds": seconds,
                "cpu_seconds": [float(each[1]) for each in both],
                "cores_of_others": max(0.0, others / seconds),
            }
            turns.append(row | ({"bytes_per_step": sent} if way == "two" else {}))
            if rank == 0:
                print(row, flush=True)
        if rank == 0:
            write(asked, turns, learned)


def record_of(asked: argparse.Namespace) -> Path:
    """Return the path of the record."""
    return Path(asked.results / f"ranks-{asked.images}-{asked.epochs}.json")


def earlier(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the turns that the record has, if there are to be more."""
    return list(json.loads(record_of(asked).read_text())["turns"]) if asked.more else []


def write(asked: argparse.Namespace, turns: list[dict[str, Any]], learned: dict[str, dict[str, Tensor]]) -> None:
    """Write the record, and print it."""
    loud = {row["turn"] for row in turns if row["cores_of_others"] > OTHERS}
    counted = [row for row in turns if row["turn"] not in loud]
    if not counted:
        print(f"others kept more than {OTHERS} cores busy in every turn: nothing is written")
        return
    seconds = {way: [row["seconds"] for row in counted if row["way"] == way] for way in WAYS}
    efficiency = [one / (2 * two) for one, two in zip(seconds["one"], seconds["two"], strict=True)]
    ceiling = [one / apart for one, apart in zip(seconds["one"], seconds["apart"], strict=True)]
    spent = {way: [sum(row["cpu_seconds"]) for row in counted if row["way"] == way] for way in WAYS}
    work_share = [one / two for one, two in zip(spent["one"], spent["two"], strict=True)]
    one, two = learned["one"], learned["two"]
    record = machine(torch.device("cpu")) | {
        "images": asked.images,
        "epochs": asked.epochs,
        "batch": asked.batch,
        "turns": turns,
        "turns_not_counted": sorted(loud),
        "efficiency": efficiency,
        "median_efficiency": statistics.median(efficiency),
        "work_efficiency": work_share,
        "median_work_efficiency": statistics.median(work_share),
        "ceiling": ceiling,
        "median_ceiling": statistics.median(ceiling),
        "largest_difference": max(
            float((one[n].double() - two[n].double()).abs().max()) for n in one if one[n].numel()
        ),
    }
    write_text(record_of(asked), json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps({name: value for name, value in record.items() if name != "turns"}, indent=1))


def main() -> None:
    """Run all turns in two processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=64, help="of both processes together")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--more", action="store_true", help="add the turns to those of the record")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        multiprocessing.spawn(work, (asked, place), nprocs=2)


if __name__ == "__main__":
    main()
