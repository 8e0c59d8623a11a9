"""Count the least bytes and operations that noise needs, and the time of a machine for them.

The floor of a VMP step is Tent's time plus the slower of the two, which may overlap each other. Bytes move at the
machine's copying speed. Only operations that make ε and multiply it count; all others are few.
"""

from typing import Any

import torch
from torch import Tensor, nn

from undrift_bench.bench.harness.measure import laps
from undrift_bench.bench.speed.steps import Case

OPERATIONS = {"cuda": (14.5, 16.5), "cpu": (15.5, 4.0)}
"""Operations a value, forward and backward.

CUDA: instructions in the machine code of `add_noise` and `noise_gradients` (sm_90; benchmarks/NOTES.md, version 14: the
last that changed them). CPU: PyTorch's elementwise operators in kernels.cpu_pieces, 29 for two values of √plane·ε and
one more a value; these are kept for the backward pass there, which multiplies and adds up.
"""
ISSUED = 4 * 32
"""Instructions that one of NVIDIA's multiprocessors starts in a cycle, at most: four schedulers, 32 lanes each."""


def layers(case: Case, x: Tensor) -> list[tuple[int, torch.Size]]:
    """Return for each layer that has noise how many numbers go in, and the shape of what comes out."""
    net, found = case.build().to(x.device), list[tuple[int, torch.Size]]()
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.register_forward_hook(lambda _, args, output: found.append((args[0].numel(), output.shape)))
    with torch.no_grad():
        net(x)
    return found


def extra_bytes(noisy: list[tuple[int, torch.Size]], low: bool, compiled: bool = False) -> int:
    """Return the bytes that noise must move in a step beyond Tent: x; y twice; grad of y; x, its grad, and that again.

    The box filter works on one plane a group, and ε is computed: neither counts. The first layer's input has no grad.
    A compiler sums x² where x is written, and adds its gradient where that of x is read: there x costs nothing.
    """
    if compiled:
        return 3 * sum(out.numel() for _, out in noisy) * (2 if low else 4)
    first, *others = noisy
    numbers = first[0] + 3 * first[1].numel() + sum(4 * given + 3 * out.numel() for given, out in others)
    return numbers * (2 if low else 4)


def floor(
    noisy: list[tuple[int, torch.Size]], device: torch.device, low: bool, compiled: bool = False
) -> dict[str, Any]:
    """Return what noise adds to a step at the least: `extra_bytes`, `extra_ms`, `operations`, and their time if known.

    The time of operations is that of starting them on all multiprocessors at the clock's peak, all other work left
    out; only where a GPU says how fast its clock is.

    Args:
        noisy: what `layers` found.
    """
    moved, values = extra_bytes(noisy, low, compiled), sum(out.numel() for _, out in noisy)
    operations = values * sum(OPERATIONS[device.type])
    found = {"extra_bytes": moved, "extra_ms": 1e3 * moved / copying(device), "operations": operations}
    rate = issuing(device)
    return found | ({"operations_ms": 1e3 * operations / rate} if rate else {})


def floor_ms(row: dict[str, Any]) -> float | None:
    """Return the milliseconds that noise adds at the least, None where that was not counted.

    Examples:
        >>> floor_ms({"extra_ms": 2.0, "operations_ms": 0.5}), floor_ms({"extra_ms": 1.0}), floor_ms({})
        (2.0, 1.0, None)
    """
    known = [row[name] for name in ("extra_ms", "operations_ms") if name in row]
    return max(known, default=None)


def copying(device: torch.device) -> float:
    """Return the bytes a second that this machine reads and writes when it copies a tensor larger than its caches."""
    source = torch.empty(2**26 if device.type == "cuda" else 2**25, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / min(laps(lambda: target.copy_(source), device, 5))


def issuing(device: torch.device) -> float | None:
    """Return the instructions a second that an NVIDIA GPU starts at most; None elsewhere, or where it is not known."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    about = torch.cuda.get_device_properties(device)
    kilohertz = getattr(about, "clock_rate", None)  # not in every version of PyTorch
    return ISSUED * about.multi_processor_count * 1e3 * kilohertz if kilohertz else None
