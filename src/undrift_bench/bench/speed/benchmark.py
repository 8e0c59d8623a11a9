"""`speed`: the cost of a Bayesian step over Tent's, as ratios within one run.

    undrift bench speed                          # all parts
    undrift bench speed --only steps,growth      # some of them

Parts: steps (each rival, uncompiled and compiled), growth (time and memory over batch, image, width, samples and
classes), launches (kernels and waits a step), kernels (their times by what they do), predict (ten draws, fast and the
mean network over a noise-free pass), startup (import, `perturb` of a ResNet-50). Each step of *steps*, *launches* and
*kernels* has its own process. They compile side by side, which takes a minute or two, and are then measured one by one:
medians of 30 steps after a warm-up. Beside each ratio is its floor, the least that a step must cost
(undrift_bench.bench.speed.floor).

Rows are written as they are measured. Those of an interrupted part are kept under "unfinished", beside the complete
result of an earlier run. *growth* continues there; other parts start again, as their ratios belong to one run.
"""

import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from undrift._errors import OptionError
from undrift.system.atomic import write_text
from undrift_bench.bench.harness.measure import machine
from undrift_bench.bench.harness.request import Request
from undrift_bench.bench.harness.run import Outcome, Say
from undrift_bench.bench.speed.figure import figure
from undrift_bench.bench.speed.growth import KINDS
from undrift_bench.bench.speed.jobs import Incomplete, measured, streamed
from undrift_bench.bench.speed.modes import settings
from undrift_bench.bench.speed.predict import FORM
from undrift_bench.bench.speed.report import text
from undrift_bench.bench.speed.steps import Case

GPU = (Case("WRN-28", 200, 32), Case("ResNet-50", 64, 224, 1000), Case("ViT-S/16", 64, 224, 1000))
CPU = (Case("WRN-40", 64, 32, width=2),)
Rows = Iterator[dict[str, Any]]


def benchmark(request: Request, say: Say = print, quiet: bool = False) -> Outcome:  # noqa: ARG001  as every benchmark
    """Measure the parts asked for, and write speed.json, speed.md and speed.png; parts measured earlier stay."""
    unknown = [name for name in request.only if name not in PARTS]
    if unknown:
        raise OptionError(f"speed has no part {unknown[0]!r}; needed: one of {', '.join(PARTS)}. Choose these.")
    device = request.place
    kept = request.results / f"speed-{device.type}.json"
    request.results.mkdir(parents=True, exist_ok=True)
    outcome = Outcome()
    for part in PARTS:
        if not request.only or part in request.only:
            try:
                measure_part(part, kept, device, request.tiny, say)
                outcome.ran += 1
            except Incomplete as why:  # its rows lie under "unfinished"; what an earlier run found of it stays
                say(f"{part} failed: {why}")
                outcome.failed += 1
    outcome.wrote = [kept, *pages(kept)]
    outcome.text = kept.with_suffix(".md").read_text(encoding="utf-8")
    return outcome


def measure_part(part: str, kept: Path, device: torch.device, tiny: bool, say: Say) -> None:
    """Measure one part, and write the record after each row: whole or not at all, whatever stops it."""
    found = record(kept)
    unfinished = found.pop("unfinished", {})
    about = {"machine": machine(device), **settings(device)}
    before, started = unfinished.pop(part, {"rows": []}), time.monotonic()
    rows = whole_sizes(before["rows"]) if part == "growth" and _alike(before, about) else []
    now, spent = before, before["seconds"] if rows else 0.0
    for row in PARTS[part](device, tiny, say, **({"had": tuple(rows)} if rows else {})):
        rows.append(row)
        now = {"rows": rows, **about, "seconds": round(spent + time.monotonic() - started, 1)}
        _write(kept, found | {"unfinished": unfinished | {part: now}})
    if rows and all("error" in row for row in rows):
        _write(kept, found | ({"unfinished": unfinished} if unfinished else {}))
        raise Incomplete(f"no row of it could be measured: {rows[0]['error']}")
    if rows:  # a CPU launches no kernels
        found[part] = now
    _write(kept, found | ({"unfinished": unfinished} if unfinished else {}))


def whole_sizes(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of sizes at which every rival of growth was measured."""
    found = Counter((row["axis"], row["size"]) for row in rows)
    return [row for row in rows if found[row["axis"], row["size"]] == len(KINDS)]


def _alike(before: dict[str, Any], about: dict[str, Any]) -> bool:
    """Return whether a part was measured as it would be now, on this kind of machine; days do not matter."""
    now = [about["machine"].get(name) for name in ("hardware", "torch")]
    then = [before.get("machine", {}).get(name) for name in ("hardware", "torch")]
    return now == then and all(before.get(name) == value for name, value in about.items() if name != "machine")


def record(kept: Path) -> dict[str, Any]:
    """Return what was measured so far."""
    return dict(json.loads(kept.read_text(encoding="utf-8"))) if kept.exists() else {}


def _write(kept: Path, found: dict[str, Any]) -> None:
    write_text(kept, json.dumps(found, indent=1, ensure_ascii=False) + "\n")


def pages(kept: Path) -> list[Path]:
    """Write the tables and the figure of a record beside it; return their places."""
    found, wrote = record(kept), [kept.with_suffix(".md")]
    write_text(wrote[0], text(found))
    if found.get("growth"):
        wrote.append(kept.with_suffix(".png"))
        figure(wrote[1], found)
    return wrote


def _steps(device: torch.device, tiny: bool, say: Say) -> Rows:
    """Give time and memory of each rival's step, uncompiled and compiled."""
    gpu = device.type == "cuda"
    cases = GPU if gpu else (replace(CPU[0], batch=2, side=8),) if tiny else CPU
    jobs = [
        {"case": asdict(c), "kind": kind, "compiled": compiled, "low": low}
        for c in cases
        for kind, compiled, low in (
            ("tent", False, gpu),
            ("vmp", False, gpu),
            *([("tent", True, True), ("vmp", True, True), ("fine-tune", False, True)] if gpu else []),
            *([("tent", False, False)] if gpu else []),
            *([("released", False, False)] if c.network != "ViT-S/16" else []),
        )
    ]
    if gpu:  # and again with CUDA graphs: the same kernels, of which none waits for Python
        jobs += [job | {"graphs": True} for job in jobs if job["low"] and job["kind"] in {"tent", "vmp"}]
    return measured([job | ({"steps": 3} if tiny else {}) for job in jobs], device, say)


def _growth(device: torch.device, tiny: bool, say: Say, had: tuple[dict[str, Any], ...] = ()) -> Rows:
    """Give time and memory over each size, for Tent, VMP and fine-tuning, uncompiled; `had` are rows that are there."""
    gpu = device.type == "cuda"
    base = Case("WRN-28", 64, 32, width=10) if gpu else Case("WRN-40", 16, 32, width=2)
    sizes: dict[str, tuple[int, ...]] = {
        "batch": (8, 32, 128, 512) if gpu else (4, 16, 64),
        "side": (32, 64, 128) if gpu else (16, 32, 64),
        "width": (2, 5, 10, 16) if gpu else (1, 2, 4),
        "samples": (1, 2, 4, 8),
        "classes": (10, 1000, 10000),
    }
    if tiny:
        base, sizes = Case("WRN-40", 2, 8, width=1), {"batch": (2, 4)}
    job = {"kinds": tuple(KINDS), "low": gpu, "steps": 2 if tiny else 10 if gpu else 3}
    there = {(row["axis"], row["size"]) for row in had}
    todo = [(axis, size) for axis, among in sizes.items() for size in among if (axis, size) not in there]
    cases = [(axis, asdict(base) | {axis: size}) for axis, size in todo]
    return streamed({**job, "cases": cases}, device, say)


def _launches(device: torch.device, tiny: bool, say: Say) -> Rows:  # noqa: ARG001
    """Give kernel launches and waits for the device in one step; a CPU has none."""
    if device.type != "cuda":
        return iter(())
    jobs = [{"case": asdict(c), "kind": k, "look": "launches", "low": True} for c in GPU for k in ("tent", "vmp")]
    return measured(jobs, device, say)


def _kernels(device: torch.device, tiny: bool, say: Say) -> Rows:  # noqa: ARG001
    """Give the milliseconds of a compiled step's kernels, by what they do; a CPU has none."""
    if device.type != "cuda":
        return iter(())
    job = {"look": "kernels", "low": True, "compiled": True}
    return measured([job | {"case": asdict(c), "kind": k} for c in GPU for k in ("tent", "vmp")], device, say)


def _predict(device: torch.device, tiny: bool, say: Say) -> Rows:
    """Give the time of predictions; on a CPU of a small network with few images, as ten draws of 200 take minutes."""
    gpu = device.type == "cuda"
    job: dict[str, Any] = {"network": "wrn40_2", "batches": (16, 8), "low": False, "repeats": 3, "settling": 1}
    if gpu:
        job = {"network": "wrn28_10", "batches": (200, 8), "low": True, "repeats": 20, "settling": 3}
    if tiny:
        job |= {"network": "wrn40_2", "batches": (2,), "repeats": 1, "settling": 0}
    return (row | {"fast": FORM} for row in streamed(job, device, say))


def _startup(device: torch.device, tiny: bool, say: Say) -> Rows:  # noqa: ARG001
    """Give the seconds of importing undrift (and torch alone), and of perturbing a ResNet-50."""
    program = "import time; t = time.perf_counter(); import {}; print(time.perf_counter() - t)"
    perturbing = (
        "import time, undrift; net = undrift_bench.zoo.build('resnet50', classes=10); t = time.perf_counter(); "
        "undrift.perturb(net); print(time.perf_counter() - t)"
    )
    programs = {"import torch": program.format("torch"), "import undrift": program.format("undrift")}
    for name, code in (programs | {"perturb a ResNet-50": perturbing}).items():
        times = [float(subprocess.check_output([sys.executable, "-c", code], text=True)) for _ in range(3)]  # noqa: S603
        yield {"what": name, "seconds": statistics.median(times)}


PARTS: dict[str, Callable[..., Rows]] = {
    "steps": _steps,
    "growth": _growth,
    "launches": _launches,
    "kernels": _kernels,
    "predict": _predict,
    "startup": _startup,
}
