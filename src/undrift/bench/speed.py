"""`speed`: what a Bayesian step costs beside Tent's, as ratios of one run on whatever machine it finds.

    undrift bench speed                          # all parts
    undrift bench speed --only steps,growth      # some of them

Parts: steps (each rival, uncompiled and compiled), growth (time and memory over batch, image, width, samples and
classes), launches (kernels and waits a step), kernels (their times by what they do), startup (import, `perturb` of a
ResNet-50). Each case runs in a process of its own, so that none sees another's memory or compiled code; all get ready
side by side, which takes the compiler a minute or two, and are then measured one by one. Medians of 30 steps after a
warm-up. The floor of a VMP step is the fastest Tent's time and what the extra passes over activations must cost: their
bytes (`extra_bytes`) over the machine's own copying speed.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

import torch

from undrift._atomic import write_text
from undrift._errors import OptionError
from undrift.bench.measure import machine, wait
from undrift.bench.request import Request
from undrift.bench.run import Outcome, Say
from undrift.bench.speed_kernels import counted, timed
from undrift.bench.speed_report import figure, how, text
from undrift.bench.speed_steps import Case, extra_bytes, make_step

GPU = (Case("WRN-28", 200, 32), Case("ResNet-50", 64, 224, 1000), Case("ViT-S/16", 64, 224, 1000))
CPU = (Case("WRN-40", 64, 32, width=2),)
PARTS = ("steps", "growth", "launches", "kernels", "startup")
STEPS, WARM_UP = 30, 8
ALL_AT_ONCE = 96 * 2**30  # bytes that a GPU needs to hold every step at the same time


def benchmark(request: Request, say: Say = print, quiet: bool = False) -> Outcome:  # noqa: ARG001  as every benchmark
    """Measure the parts asked for, and write speed.json, speed.md and speed.png; parts measured earlier stay."""
    unknown = [name for name in request.only if name not in PARTS]
    if unknown:
        raise OptionError(f"speed has no part {unknown[0]!r}; needed: one of {', '.join(PARTS)}. Choose these.")
    device = request.place
    kept = request.results / f"speed-{device.type}.json"
    found: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    request.results.mkdir(parents=True, exist_ok=True)
    outcome = Outcome()
    for part in PARTS:
        if request.only and part not in request.only:
            continue
        started = time.monotonic()
        found[part] = {"rows": _MEASURES[part](device, request.tiny, say), "machine": machine(device)}
        found[part]["seconds"] = round(time.monotonic() - started, 1)
        write_text(kept, json.dumps(found, indent=1, ensure_ascii=False) + "\n")
        outcome.ran += 1
    outcome.text = text(found)
    write_text(kept.with_suffix(".md"), outcome.text)
    outcome.wrote += [kept, kept.with_suffix(".md")]
    if found.get("growth"):
        figure(kept.with_suffix(".png"), found)
        outcome.wrote.append(kept.with_suffix(".png"))
    return outcome


def _steps(device: torch.device, tiny: bool, say: Say) -> list[dict[str, Any]]:
    """Return time and memory of each rival's step, uncompiled and compiled."""
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
    return _measured([job | ({"steps": 3} if tiny else {}) for job in jobs], device, say)


def _growth(device: torch.device, tiny: bool, say: Say) -> list[dict[str, Any]]:
    """Return time and memory over each size, for Tent, VMP and fine-tuning, uncompiled."""
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
    job = {"kinds": ("tent", "vmp", "fine-tune"), "low": gpu, "steps": 2 if tiny else 10 if gpu else 3}
    cases = [(axis, asdict(base) | {axis: size}) for axis, among in sizes.items() for size in among]
    out, error = _start({**job, "cases": cases}, device).communicate("go\n")
    for line in error.splitlines():
        if line.startswith("failed"):
            say(line)
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def _launches(device: torch.device, tiny: bool, say: Say) -> list[dict[str, Any]]:  # noqa: ARG001
    """Return kernel launches and waits for the device in one step; a CPU has none."""
    if device.type != "cuda":
        return []
    jobs = [{"case": asdict(c), "kind": k, "look": "launches", "low": True} for c in GPU for k in ("tent", "vmp")]
    return _measured(jobs, device, say)


def _kernels(device: torch.device, tiny: bool, say: Say) -> list[dict[str, Any]]:  # noqa: ARG001
    """Return the milliseconds of a compiled step's kernels, by what they do; a CPU has none."""
    if device.type != "cuda":
        return []
    job = {"look": "kernels", "low": True, "compiled": True}
    return _measured([job | {"case": asdict(c), "kind": k} for c in GPU for k in ("tent", "vmp")], device, say)


def _startup(device: torch.device, tiny: bool, say: Say) -> list[dict[str, Any]]:  # noqa: ARG001
    """Return the seconds of importing undrift (and torch alone), and of perturbing a ResNet-50."""
    program = "import time; t = time.perf_counter(); import {}; print(time.perf_counter() - t)"
    perturbing = (
        "import time, undrift; net = undrift.zoo.build('resnet50', classes=10); t = time.perf_counter(); "
        "undrift.perturb(net); print(time.perf_counter() - t)"
    )
    programs = {"import torch": program.format("torch"), "import undrift": program.format("undrift")}
    rows = []
    for name, code in (programs | {"perturb a ResNet-50": perturbing}).items():
        times = [float(subprocess.check_output([sys.executable, "-c", code], text=True)) for _ in range(3)]  # noqa: S603
        rows.append({"what": name, "seconds": statistics.median(times)})
    return rows


_MEASURES = {"steps": _steps, "growth": _growth, "launches": _launches, "kernels": _kernels, "startup": _startup}
_LOOKS = {"launches": counted, "kernels": timed}


# In a process of its own -----------------------------------------------------------------------------------------


def _start(job: dict[str, Any], device: torch.device, errors: Any = subprocess.PIPE) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "undrift.bench.speed", str(device), json.dumps(job)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
    return subprocess.Popen(command, text=True, **pipes)  # noqa: S603


def _measured(jobs: list[dict[str, Any]], device: torch.device, say: Say) -> list[dict[str, Any]]:
    """Return what each job measured; all get ready together where memory allows, else a network's at a time."""
    if device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory < ALL_AT_ONCE:
        names = dict.fromkeys(job["case"]["network"] for job in jobs)
        return [row for n in names for row in _together([j for j in jobs if j["case"]["network"] == n], device, say)]
    return _together(jobs, device, say)


def _together(jobs: list[dict[str, Any]], device: torch.device, say: Say) -> list[dict[str, Any]]:
    """Return what each job measured, alone on the machine; one that failed says why, and the others go on."""
    with ExitStack() as stack:
        # Their warnings go to files: a full pipe would stop a process that nobody reads yet.
        files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in jobs]
        processes = [stack.enter_context(_start(job, device, file)) for job, file in zip(jobs, files, strict=True)]
        for process in processes:
            stack.callback(process.kill)  # where this one is interrupted; nothing to one that has ended
        for process in processes:
            assert process.stdout is not None
            any(line == "ready\n" for line in process.stdout)  # or the end, where it failed
        rows = []
        for job, process, file in zip(jobs, processes, files, strict=True):
            out, _ = process.communicate("go\n")
            lines = [line for line in out.splitlines() if line.startswith("{")]
            file.seek(0)
            result = (
                json.loads(lines[-1]) if lines else {"error": (file.read().strip().splitlines() or ["no answer"])[-1]}
            )
            say(f"{job['case']['network']} {job['kind']} {how(job)}: {result}")
            rows.append({**job, **result})
        return rows


def measure(job: dict[str, Any], device: torch.device, go: Callable[[], object] = bool) -> dict[str, Any]:
    """Return median milliseconds a step and the peak of memory in MiB; waits for `go` between warm-up and measuring."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    case = Case(**job["case"])
    mode = {name: job.get(name, False) for name in ("compiled", "low", "graphs")}
    step = make_step(job["kind"], case, device, **mode)
    x = torch.rand(case.batch, 3, case.side, case.side, device=device)
    x = x.to(memory_format=torch.channels_last) if job.get("low") else x
    steps = job.get("steps", STEPS if device.type == "cuda" else 7)
    for _ in range(min(WARM_UP, steps)):
        step(x)
    wait(device)
    go()
    step(x)
    if job.get("look"):
        return _LOOKS[job["look"]](step, x)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(steps):
        wait(device)
        start = time.perf_counter()
        step(x)
        wait(device)
        times.append(1e3 * (time.perf_counter() - start))
    peak = torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else None
    found = {"ms": statistics.median(times), "least_ms": min(times), "peak": peak}
    if job["kind"] == "vmp" and job.get("floor", True):
        extra = extra_bytes(case, x, job.get("low", False))
        found |= {"extra_bytes": extra, "extra_ms": 1e3 * extra / _copying(device)}
    return found


def _copying(device: torch.device) -> float:
    """Return the bytes a second that this machine reads and writes when it copies a tensor larger than its caches."""
    source = torch.empty(2**26 if device.type == "cuda" else 2**25, device=device)
    target, times = torch.empty_like(source), []
    for _ in range(5):
        wait(device)
        start = time.perf_counter()
        target.copy_(source)
        wait(device)
        times.append(time.perf_counter() - start)
    return 2 * source.nbytes / min(times)


def _ready() -> None:
    """Say that measuring could begin, and wait for a line that says it may."""
    print("ready", flush=True)
    if not sys.stdin.readline():
        sys.exit("nobody waits for this measurement any more")


def main() -> None:
    """Measure one job given as JSON, and print what was found as a line of JSON."""
    device, job = torch.device(sys.argv[1]), json.loads(sys.argv[2])
    if "cases" not in job:
        print(json.dumps(measure(job, device, _ready)), flush=True)
        return
    for axis, case in job["cases"]:
        for kind in job["kinds"]:
            try:
                asked = {"case": case, "kind": kind, "low": job["low"], "steps": job["steps"], "floor": False}
                found = measure(asked, device)
            except torch.OutOfMemoryError as error:
                print(f"failed {axis} {case} {kind}: {error}", file=sys.stderr)
                continue
            print(json.dumps({"axis": axis, "size": case[axis], "kind": kind, **found}), flush=True)


if __name__ == "__main__":
    main()
