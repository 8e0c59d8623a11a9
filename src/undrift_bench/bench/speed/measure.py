"""Run one measuring process of `undrift bench speed`: a step, steps over sizes, or predictions.

    python -m undrift_bench.bench.speed.measure DEVICE JOB

prints a line of JSON for each result. A single step has three phases, each started by a line of input: cuDNN tries its
algorithms, alone on the machine; the step is built, compiled and warmed up, in parallel with others; the step is
measured, alone again.
"""

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from undrift.system.malloc import keep_freed
from undrift_bench import zoo
from undrift_bench.bench.harness.measure import laps
from undrift_bench.bench.speed.floor import floor, layers
from undrift_bench.bench.speed.kernels import counted, timed
from undrift_bench.bench.speed.memory import Peaks, kept_for_backward, redrawing, tidy
from undrift_bench.bench.speed.modes import quickest
from undrift_bench.bench.speed.predict import times as prediction_times
from undrift_bench.bench.speed.steps import Case, images, make_loss, make_step

STEPS, STEPS_ON_CPU, WARM_UP = 30, 7, 8
Turn = Callable[[], object]
_LOOKS = {"launches": counted, "kernels": timed}


def measure(job: dict[str, Any], device: torch.device, turn: Turn = bool) -> dict[str, Any]:
    """Return median milliseconds a step and its memory in MiB; `turn` is called before each of the three turns."""
    case, low = Case(**job["case"]), job.get("low", False)
    with quickest():
        trial = _trial(job["kind"], case, device, low) if device.type == "cuda" else None
        turn()
        if trial is not None:
            with suppress(torch.OutOfMemoryError):  # rivals that train less may fit: their own first steps try then
                trial()
            trial = None  # its network is not the one that is measured
            tidy(device)
        turn()
        memory = Peaks(device)
        mode = {name: job.get(name, False) for name in ("compiled", "graphs")}
        step, x = make_step(job["kind"], case, device, low=low, **mode), images(case.batch, case.side, device, low)
        steps = job.get("steps", STEPS if device.type == "cuda" else STEPS_ON_CPU)
        for _ in range(min(WARM_UP, steps)):
            step(x)
        memory.settle()  # before the turn: what this one does not need now, others can use
        turn()
        step(x)
        if job.get("look"):
            return _LOOKS[job["look"]](step, x)
        taken = [1e3 * seconds for seconds in laps(partial(step, x), device, steps)]
        found: dict[str, Any] = {"ms": statistics.median(taken), "least_ms": min(taken)} | memory.found()
        if device.type == "cpu":
            loss, parameters, net = make_loss(job["kind"], case, device, low)
            found["kept"] = kept_for_backward(loss, x, [*net.parameters(), *net.buffers(), *parameters])
        if job["kind"] == "vmp" and job.get("floor", True):
            noisy = layers(case, x)
            found |= floor(noisy, device, low, mode["compiled"])
            found |= redrawing(shape for _, shape in noisy) if device.type == "cpu" else {}
        return found


_tried: set[tuple[Case, bool, str]] = set()


def _trial(kind: str, case: Case, device: torch.device, low: bool) -> Callable[[], object]:
    """Return what lets cuDNN choose for every shape of a convolution and of its gradients: once a process, it keeps it.

    A step that trains all weights has them all; the released formulation has convolutions of its own. Neither classes
    nor draws change a convolution.
    """
    shapes = (replace(case, classes=10, samples=1), low, "released" if kind == "released" else "fine-tune")
    if shapes in _tried:
        return bool
    _tried.add(shapes)
    return partial(make_step(shapes[2], case, device, low=low), images(case.batch, case.side, device, low))


def over_sizes(job: dict[str, Any], device: torch.device) -> Iterator[dict[str, Any]]:
    """Give a row for each size and rival, one after the other; one that memory does not hold has an `error`."""
    for axis, case in job["cases"]:
        for kind in job["kinds"]:
            row = {"axis": axis, "size": case[axis], "kind": kind}
            asked = {"case": case, "kind": kind, "low": job["low"], "steps": job["steps"], "floor": False}
            try:
                yield row | measure(asked, device)
            except torch.OutOfMemoryError as error:
                yield row | {"error": str(error).partition("\n")[0]}


def predictions(job: dict[str, Any], device: torch.device) -> Iterator[dict[str, Any]]:
    """Give a row for each way to predict and each batch."""
    net = zoo.build(job["network"]).to(device).eval()
    about = {"network": job["network"], "low": job["low"]}
    for row in prediction_times(net, device, job["batches"], job["low"], job["repeats"], job["settling"]):
        yield about | row


def _wait_for_turn() -> None:
    """Say that all is done so far, and wait for a line that says to go on."""
    print("ready", flush=True)
    if not sys.stdin.readline():
        sys.exit("nobody waits for this measurement any more")


def main() -> None:
    """Measure one job given as JSON, and print what was found as lines of JSON."""
    device, job = torch.device(sys.argv[1]), json.loads(sys.argv[2])
    keep_freed()  # as the command line does; every rival
    if "kind" in job:
        print(json.dumps(measure(job, device, _wait_for_turn)), flush=True)
        return
    for row in over_sizes(job, device) if "cases" in job else predictions(job, device):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
