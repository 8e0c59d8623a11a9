"""Measure the memory of a step: the allocator's peaks on a GPU, what autograd keeps on a CPU.

A GPU's peaks are relative to the memory before the network, after garbage collection and with empty caches, so they do
not depend on what the process did earlier. *Allocated* is what tensors take. A CUDA graph's pool belongs to no tensor
between two replays and shows only in *reserved* memory, which includes pools and cached blocks.
"""

import gc
import statistics
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from undrift.kernels import cpu
from undrift_bench.bench.harness.measure import laps

MIB = 2**20


class Peaks:
    """The peaks of a GPU's memory above what lay there at first; on a CPU nothing is known."""

    def __init__(self, device: torch.device) -> None:
        """Start, before the network and its images are on the device."""
        self.device = device
        self._allocated = self._reserved = 0
        if device.type == "cuda":
            tidy(device)
            self._allocated, self._reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)

    def settle(self) -> None:
        """Forget the peaks so far: compilers and trials of algorithms need more than any step after them."""
        if self.device.type == "cuda":
            tidy(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)

    def found(self) -> dict[str, float]:
        """Return MiB: `peak` (allocated) and `reserved`, above what was allocated `before`."""
        if self.device.type != "cuda":
            return {}
        peak = torch.cuda.max_memory_allocated(self.device) - self._allocated
        reserved = torch.cuda.max_memory_reserved(self.device) - self._reserved
        return {"peak": peak / MIB, "reserved": reserved / MIB, "before": self._allocated / MIB}


def tidy(device: torch.device) -> None:
    """Give a GPU all memory back that nobody needs any more."""
    torch.cuda.synchronize(device)
    gc.collect()  # hooks make circles: a network that nobody has any more still lies there
    torch.cuda.empty_cache()


def kept_for_backward(loss: Callable[[Tensor], Tensor], x: Tensor, apart: Iterable[Tensor]) -> float:
    """Return the MiB that autograd holds between a forward and its backward pass.

    Each piece of memory counts once, however many operators keep it. The batch itself does not count.

    Args:
        apart: parameters and buffers, which lie there anyway.
    """
    lies_there = {_place(t) for t in (x, *apart)}
    held: dict[int, Tensor] = {}  # the tensors too: the place of one that was freed might be another's

    def keep(tensor: Tensor) -> Tensor:
        if _place(tensor) not in lies_there:
            held[_place(tensor)] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        value = loss(x)
    total = sum(tensor.untyped_storage().nbytes() for tensor in held.values())
    del value
    return total / MIB


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def redrawing(shapes: Iterable[torch.Size], repeats: int = 3) -> dict[str, float]:
    """Return what a CPU would pay, and save, if it drew ε again in the backward pass instead of keeping √plane·ε.

    Args:
        shapes: of the outputs with noise.
    """
    shapes, key = list(shapes), torch.tensor(7)

    def draw() -> None:
        for shape in shapes:
            out = torch.empty(shape).view(*shape[:2], -1)
            cpu.fill(out, key, 0)  # √plane is inside, and takes no pass of its own

    kept = sum(4 * shape.numel() for shape in shapes)
    taken = statistics.median(laps(draw, torch.device("cpu"), repeats))
    return {"redraw_ms": 1e3 * taken, "redraw_mib": kept / MIB}
