"""Check whether Triton's kernels run on a GPU by running a small one, once per GPU.

An installed Triton may still fail at its first kernel: no C compiler, a GPU that is too old, or a cache folder that is
not writable. That should not end a user's forward pass.
"""

import importlib.util
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from undrift.kernels.epsilon import keys_of
from undrift.system.private import without_dispatch_modes

INSTALLED = importlib.util.find_spec("triton") is not None  # here: the compiler cannot trace find_spec
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # as Triton reads it: kernels run on a CPU, slowly
ABSENT = "Triton is not installed (`import triton` finds nothing)"
_refusals: dict[int, str] = {}


def refusal(index: int) -> str:
    """Return why kernels cannot run on a GPU (−1: a CPU, in Triton's interpreter), or "" where they can."""
    found = _refusals.get(index)
    return _first(index) if found is None else found


def _first(index: int) -> str:
    if not INSTALLED:
        return ABSENT
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return ""  # a graph of CUDA may not wait for what a kernel wrote: tried another time
    # Not under somebody's dispatch mode: it would see our kernel, or make its tensors fake.
    with without_dispatch_modes(), torch.no_grad():
        _refusals[index] = _tried(index)
    return _refusals[index]


def _tried(index: int) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a warning is no refusal, wherever warnings are made errors
            with _may_wait(index):
                return _compared(index)
    except Exception as error:  # Triton, the C compiler behind it and the driver all have errors of their own
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
            raise  # nothing is known of Triton then
        lines = str(error).strip().splitlines() or ["no message"]
        return f"Triton's first kernel did not run ({type(error).__name__}: {lines[0]:.200})"


def _compared(index: int) -> str:
    """Return "" where the kernel writes what it should."""
    device = torch.device("cuda", index) if index >= 0 else torch.device("cpu")
    seed, step = (torch.full((), number, device=device) for number in (12345, 678))
    if torch.equal(_launched(seed, step, 2), keys_of(seed, step, 2)):
        return ""
    return "Triton's first kernel wrote other numbers than it should"


@contextmanager
def _may_wait(index: int) -> Iterator[None]:
    """Read back from the GPU unseen: whoever forbids or counts that means the steps, not this one time."""
    before = torch.cuda.get_sync_debug_mode() if index >= 0 else 0
    if not before:
        yield
        return
    torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _launched(seed: Tensor, step: Tensor, count: int) -> Tensor:
    """Return a step's keys by the kernel that the network's own steps begin with: it is compiled once for both."""
    from undrift.kernels.triton import launch

    return launch.keys(seed, step, count)
