"""A kernel's launch with everything but its tensors settled, and quick after the first time.

Triton looks at each argument of each launch, to find the compiled kernel that fits: 50 µs of Python where a network has
a hundred layers. What it looks at cannot change here: integers are settled, dtypes and strides too, and addresses are
checked to be multiples of 16. So the first launch is Triton's own, and what it compiled is launched directly from then
on, by Triton's launcher or, once that is there, without it (`native`): after it was seen to write what the first launch
wrote.
"""

import importlib
from collections.abc import Callable, Sequence
from functools import cache, reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

from undrift.kernels.triton import native
from undrift.kernels.triton.native.packed import packed


class Call:
    """One kernel, its grid and its integers; called with the tensors, in the kernel's order.

    `native` is the kernel for `native.module.launch`, once that was seen to write the same.

    Args:
        kernel: a function of Triton.
        grid: programs along two axes.
        numbers: the arguments after the tensors, in order.
        constants: the compile-time arguments, in order.
        device: index of the GPU.
        writes: which of the tensors the kernel writes.
        warps: of a program.
    """

    __slots__ = (
        "_direct", "_tried", "constants", "device", "grid", "kernel", "native", "numbers", "warps", "writes"
    )  # fmt: skip

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int],
        numbers: Sequence[float],
        constants: dict[str, Any],
        device: int,
        writes: tuple[int, ...],
        warps: int = 4,
    ) -> None:
        self.kernel, self.grid, self.numbers, self.constants = kernel, grid, tuple(numbers), constants
        self.device, self.writes, self.warps = device, writes, warps
        self._tried: set[bool] = set() if direct_launches() else {False, True}  # True: natively
        self._direct: _Direct | None = None
        self.native: Any = None

    @property
    def tried(self) -> bool:
        """Whether a launch is one launch: the first may be repeated, to be compared."""
        return (native.module is not None) in self._tried

    def __call__(self, *tensors: Tensor) -> None:
        """Launch the kernel on the tensors' device, in its current stream."""
        if self.native is not None and native.module is not None:
            if native.module.launch(self.native, *tensors):
                return
        elif self._direct is not None and self.tried:
            pointers = (*map(_address, tensors),)
            if not reduce(or_, pointers) & 15 and torch._C._cuda_getDevice() == self.device:
                run, grid, head, tail = self._direct
                run(*grid, torch._C._cuda_getCurrentRawStream(self.device), *head, *pointers, *tail)
                return
        compiled = self._launch(tensors)
        if not self.tried and not torch.cuda.is_current_stream_capturing():
            self._try(compiled, tensors)

    def _launch(self, tensors: Sequence[Tensor]) -> Any:
        """Launch as Triton does, and return what it compiled."""
        with torch.cuda.device(self.device):  # −1 for a CPU in Triton's interpreter: nothing to do
            return self.kernel[self.grid](*tensors, *self.numbers, **self.constants, num_warps=self.warps)

    def _try(self, compiled: Any, tensors: Sequence[Tensor]) -> None:
        """Keep the compiled kernel if launching it directly writes what the launch before wrote."""
        if torch._C._cuda_getDevice() != self.device or any(t.data_ptr() % 16 for t in tensors):
            return  # another time
        self._tried |= {False, native.module is not None}
        again = [torch.empty_like(t) if i in self.writes else t for i, t in enumerate(tensors)]
        if any(t.data_ptr() % 16 for t in again):
            return
        made = self._natively(compiled, again)
        direct = self._directly(compiled, again) if made is None and self._direct is None else None
        if (made or direct) and all(_alike(tensors[i], again[i]) for i in self.writes):
            self.native, self._direct = made, direct or self._direct

    def _natively(self, compiled: Any, tensors: Sequence[Tensor]) -> Any:
        """Return the kernel for `native`, launched once; None where that is not there, or knows no such kernels."""
        if native.module is None:
            return None
        try:
            found = packed(compiled, self.grid, len(tensors), self.numbers, self.device)
            made = None if found is None else native.module.kernel(*found)
            return made if made is not None and native.module.launch(made, *tensors) else None
        except _OTHERWISE:
            return None

    def _directly(self, compiled: Any, tensors: Sequence[Tensor]) -> "_Direct | None":
        """Return what launches the kernel past Triton's own launch, which it did once; None where it could not."""
        try:
            direct = run, grid, head, tail = self._prepared(compiled)
            run(*grid, torch._C._cuda_getCurrentRawStream(self.device), *head, *map(_address, tensors), *tail)
        except _OTHERWISE:
            return None
        return direct

    def _prepared(self, compiled: Any) -> "_Direct":
        run, head = _launcher(compiled.run)
        # From 3.3 on Triton's launcher is given the compile-time constants too.
        tail = (*self.numbers, *(self.constants.values() if triton_version() >= (3, 3) else ()))
        # After the kernel: no metadata and no hooks, which are for profilers.
        head = (compiled.function, *head, compiled.packed_metadata, None, None, None)
        return run, (*self.grid, 1), head, tail


_address = Tensor.data_ptr
# What a Triton raises that wants other arguments: its own launch stays.
_OTHERWISE = (TypeError, AttributeError, KeyError, ValueError, RuntimeError, SystemError)
# What launches a kernel, and its arguments: the grid; after the stream, the kernel; after the tensors, numbers.
_Direct = tuple[Callable[..., None], tuple[int, ...], tuple[Any, ...], tuple[Any, ...]]


def in_turn(first: Call, given: tuple[Tensor, ...], second: Call, then: tuple[Tensor, ...]) -> None:
    """Launch one kernel and then another of the same device; which that is, and its stream, are asked for once."""
    one, other = first._direct, second._direct
    if one is not None and other is not None and native.module is None:
        early, late = (*map(_address, given),), (*map(_address, then),)
        if not reduce(or_, early, reduce(or_, late)) & 15 and torch._C._cuda_getDevice() == first.device:
            stream = torch._C._cuda_getCurrentRawStream(first.device)
            run, grid, head, tail = one
            run(*grid, stream, *head, *early, *tail)
            run, grid, head, tail = other
            run(*grid, stream, *head, *late, *tail)
            return
    first(*given)
    second(*then)


def _launcher(run: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return what launches a kernel, and what it wants first: from 3.5 on an object of Python that asks for memory.

    Our kernels want none, and what it calls with none can be called at once.
    """
    sizes = [getattr(run, f"{kind}_scratch_size", None) for kind in ("global", "profile")]
    launch = getattr(run, "launch", None)
    if launch is None or sizes != [0, 0] or hasattr(run, "arg_annotations"):  # later ones want arguments packed
        return run, ()
    return launch, (run.launch_cooperative_grid, run.launch_pdl, None, None)


def _alike(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | ((a != a) & (b != b))).all())


@cache
def triton_version() -> tuple[int, int]:
    """Return Triton's version."""
    major, minor = importlib.import_module("triton").__version__.split(".")[:2]
    return int(major), int(minor)


@cache
def direct_launches() -> bool:
    """Return whether compiled kernels may be launched directly: on NVIDIA's GPUs, by a Triton that was looked at."""
    return torch.version.cuda is not None and torch.cuda.is_available() and (3, 2) <= triton_version() < (4, 0)
