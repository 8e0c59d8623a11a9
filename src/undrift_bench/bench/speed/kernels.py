"""Profile one step on a GPU: launches, waits, and kernel time by kind."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

OURS = ("add_noise", "noise_gradients", "square_sum", "finish", "apart")
"""Our kernels, by what their names contain; a gradient of one counts with it."""
STEPS = 3
MARK = "undrift: measured steps"


def counted(step: Callable[[Tensor], None], x: Tensor) -> dict[str, Any]:
    """Return kernel launches, waits for the device and copies to the host in one step."""
    return calls(_events(step, x, 1))


def calls(events: Sequence[Any]) -> dict[str, Any]:
    """Return what the host asked for while the step ran; the profiler itself waits before and after it.

    A wait is any call that returns when the device is through: of a stream, of the device, of an event, and a copy that
    is not asynchronous. A copy to the host is counted where the device made it, whether the host waited or not.
    """
    begun = [event.time_range for event in events if event.name == MARK and event.device_type.name == "CPU"]
    first, last = min(r.start for r in begun), max(r.end for r in begun)
    names = [e.name for e in events if first <= e.time_range.start and e.time_range.end <= last]
    return {
        "launches": sum("LaunchKernel" in name for name in names),
        "waits": sum(map(waits, names)),
        "copies to host": sum("Memcpy DtoH" in event.name for event in events),
    }


def waits(name: str) -> bool:
    """Return whether a call of CUDA's makes the host wait.

    Examples:
        >>> [waits(name) for name in ("cudaEventSynchronize", "cudaMemcpy", "cudaMemcpyAsync", "cudaStreamWaitEvent")]
        [True, True, False, False]
    """
    if not name.startswith("cu"):
        return False
    return name.endswith("Synchronize") or ("Memcpy" in name and "Async" not in name)


def timed(step: Callable[[Tensor], None], x: Tensor) -> dict[str, Any]:
    """Return how many kernels a step has, and their milliseconds by kind."""
    return spent(_events(step, x, STEPS))


def spent(events: Sequence[Any]) -> dict[str, Any]:
    """Return what the GPU did in a step: the number of its kernels, and their milliseconds by kind."""
    seen = [(event.name, event.device_time) for event in events if event.device_type.name == "CUDA"]
    # The profiler shows a part of the host's program once more, as what the GPU did meanwhile.
    kernels = [(name, 1e-3 * time / STEPS) for name, time in seen if "#" not in name and name != MARK]
    return {"kernels": round(len(kernels) / STEPS), "kernel_ms": by_kind(kernels)}


def by_kind(kernels: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the sum of times for each kind of kernel.

    Examples:
        >>> by_kind([("add_noise_kernel", 1.0), ("triton_red_fused_relu", 2.0), ("sm90_gemm", 3.0)])
        {'add_noise': 1.0, 'compiler': 2.0, 'other': 3.0}
    """
    found: dict[str, float] = {}
    for name, time in kernels:
        own = next((kind for kind in OURS if kind in name and not name.startswith("triton_")), None)
        kind = own or ("compiler" if name.startswith("triton_") else "other")
        found[kind] = found.get(kind, 0.0) + time
    return found


def _events(step: Callable[[Tensor], None], x: Tensor, steps: int) -> list[Any]:
    from torch.profiler import ProfilerActivity, profile, record_function

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        with record_function(MARK):
            for _ in range(steps):
                step(x)
        torch.cuda.synchronize()
    return list(seen.events())
