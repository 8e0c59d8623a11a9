"""What one step asks of a GPU: launches and waits, and the time of its kernels by what they do."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

OURS = ("add_noise", "noise_gradients", "square_sum", "finish")
"""Our kernels, by what their names contain; a gradient of one counts with it."""
STEPS = 3


def counted(step: Callable[[Tensor], None], x: Tensor) -> dict[str, Any]:
    """Return kernel launches and waits for the device in one step."""
    names = [event.name for event in _events(step, x, 1)]
    launches = sum("LaunchKernel" in name for name in names)
    waits = sum("Synchronize" in name and "Stream" in name for name in names)
    copies = sum("Memcpy DtoH" in name for name in names)
    return {"launches": launches, "waits": waits, "copies to host": copies}


def timed(step: Callable[[Tensor], None], x: Tensor) -> dict[str, Any]:
    """Return how many kernels a step has, and their milliseconds by kind."""
    events = [(e.name, e.device_time) for e in _events(step, x, STEPS) if e.device_type.name == "CUDA"]
    # The profiler shows a part of the host's program once more, as what the GPU did meanwhile.
    kernels = [(name, 1e-3 * time / STEPS) for name, time in events if "#" not in name]
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
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(steps):
            step(x)
        torch.cuda.synchronize()
    return list(seen.events())
