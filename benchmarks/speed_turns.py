"""Claim: on a CPU a VMP step takes about 1.5 × Tent's where both are timed in turns, and less where memory is kept.

`undrift bench speed` times each rival in a process of its own, one after the other: on a machine that others use, too,
the ratio of two such times wanders (1.39 and 1.68 on two days, of the same code). Here one process makes a step of each
in turns, and the ratio is of medians over the same minute. It is done twice: as Python comes, and with glibc told to
keep memory that was freed, as what a step frees at its end is else given back and faulted in again, page by page, in
the next one. VMP keeps √plane·ε for the backward pass, so that it has most of that.

Predicted (after a look at page faults): in turns 1.55 ×; with memory kept 1.43 ×. A first run had the released
formulation in the same process, whose larger steps kept memory for all three: 1.43 and 1.48 ×, no difference.

Command:   python benchmarks/speed_turns.py [--rounds 5]
Hardware:  two CPU cores; WRN-40-2, batch 64, float32, contiguous. About two minutes.
Output:    speed-turns.json under --results.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from undrift.system.atomic import write_text
from undrift_bench.bench.harness.measure import machine
from undrift_bench.bench.speed.steps import Case, images, make_step

CASE = Case("WRN-40", 64, 32, width=2)
KINDS = ("tent", "vmp")  # the released formulation takes more memory, and would keep it for both
KEPT = {"MALLOC_TRIM_THRESHOLD_": str(2**33), "MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TOP_PAD_": str(2**28)}


def in_turns(turns: int) -> dict[str, dict[str, float]]:
    """Return milliseconds and page faults of a step of each rival: medians over turns."""
    device = torch.device("cpu")
    x = images(CASE.batch, CASE.side, device, low=False)
    steps = {kind: make_step(kind, CASE, device, low=False) for kind in KINDS}
    found: dict[str, list[tuple[float, int]]] = {kind: [] for kind in KINDS}
    for turn in range(turns + 2):  # two to warm up
        for kind, step in steps.items():
            faults, begun = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
            step(x)
            took = 1e3 * (time.perf_counter() - begun)
            if turn > 1:
                found[kind].append((took, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults))
    return {
        kind: {"ms": statistics.median(t for t, _ in each), "faults": statistics.median(f for _, f in each)}
        for kind, each in found.items()
    }


def main(words: list[str]) -> None:
    """Measure in fresh processes, as they come and with memory kept, in turns; print and write the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="processes of each kind")
    parser.add_argument("--turns", type=int, default=7, help="steps of each rival in a process")
    parser.add_argument("--results", type=Path, default=Path(__file__).with_name("results"))
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args(words)
    if asked.inside:
        print(json.dumps(in_turns(asked.turns)))
        return
    rows: dict[str, list[dict[str, Any]]] = {"as it comes": [], "memory kept": []}
    for _ in range(asked.rounds):
        for name, settings in (("as it comes", {}), ("memory kept", KEPT)):
            command = [sys.executable, __file__, "--inside", "--turns", str(asked.turns)]
            out = subprocess.run(command, env=os.environ | settings, check=True, capture_output=True, text=True).stdout
            row = json.loads(out.splitlines()[-1])
            rows[name].append(row | {"ratio": row["vmp"]["ms"] / row["tent"]["ms"]})
            print(name, {k: (round(v["ms"]), v["faults"]) for k, v in row.items()}, f"{rows[name][-1]['ratio']:.3f}")
    about = machine(torch.device("cpu")) | {"threads": torch.get_num_threads()}
    ratios = {name: sorted(row["ratio"] for row in found) for name, found in rows.items()}
    for name, found in ratios.items():
        print(f"{name}: VMP over Tent {statistics.median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})")
    asked.results.mkdir(parents=True, exist_ok=True)
    content = about | {"case": "WRN-40-2, batch 64, float32", "settings": KEPT, "rows": rows}
    write_text(asked.results / "speed-turns.json", json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
