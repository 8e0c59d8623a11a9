"""Counts how often Python asks for a tensor's value: on a GPU each is a wait for all that was launched before it."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# What a CUDA tensor answers only after a wait: its values, or a shape that depends on them.
ASKING = ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "_unique2", "unique_dim", "equal")
# Methods that no dispatcher sees, or that do nothing on a CPU; `new_tensor` copies from the host, and waits for that.
METHODS = ("tolist", "numpy", "cpu", "new_tensor")
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")
# The tickets of activation checkpointing are drawn and read on the CPU always.
ON_THE_CPU = ("replay.py",)


class Reads(TorchDispatchMode):
    """A mode that counts them, by what was asked and where in undrift."""

    def __init__(self, apart: tuple[str, ...]) -> None:
        super().__init__()
        self.apart = apart
        self.found: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return sum(self.found.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ASKING:
            self.note(name)
        elif name in INDEXING and any(i is not None and i.dtype == torch.bool for i in args[1]):
            self.note(f"{name} by mask")
        return func(*args, **(kwargs or {}))

    def note(self, what: str) -> None:
        """Count one, unless it is asked in a file that is left out."""
        frame: Any = sys._getframe(1)
        while frame is not None and "/undrift/" not in frame.f_code.co_filename:
            frame = frame.f_back
        file = "" if frame is None else frame.f_code.co_filename.rsplit("/", 1)[1]
        if file not in self.apart:
            self.found[f"{what} in {file}:{0 if frame is None else frame.f_lineno}"] += 1


@contextmanager
def reads(patches: pytest.MonkeyPatch, *apart: str) -> Iterator[Reads]:
    """Count the reads of a `with` block, without those in the files named."""
    seen = Reads((*ON_THE_CPU, *apart))
    with patches.context() as patched:
        for name in METHODS:
            patched.setattr(Tensor, name, _noted(seen, name, getattr(Tensor, name)))
        with seen:
            yield seen


def _noted(seen: Reads, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def noted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.note(name)
        return method(tensor, *args, **kwargs)

    return noted
