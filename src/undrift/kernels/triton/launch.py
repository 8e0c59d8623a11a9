"""Launch Triton's kernels on tensors; cache what depends on shapes alone."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache, partial, reduce
from importlib.metadata import version
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from undrift.kernels.epsilon import signed
from undrift.kernels.layout import dense
from undrift.kernels.triton import tiles
from undrift.kernels.triton.tiles import Cut, Shape, cdiv

KEYS = {"BLOCK": 128}
FINISH = {"PLANE": 256, "BLOCKS": 8, "ROWS": 2048, "WIDTH": 4, "APART": 1, "RUNS": 1}
FINISHING = 8  # warps
# As many as an H200 was quickest with (benchmarks/NOTES.md, versions 13 and 14). Sums over channels make the warps of a
# program wait for each other at every step, so there programs are one warp.
ADDING = Cut(pairs=512, warps=2, fit={128: 14, 64: 14, 32: 14, 8: 12})
SUMMING = Cut(pairs=512, warps=1, fit={128: 16, 64: 16, 32: 16, 8: 12})
SHAPES = 4096  # that are remembered
ALIGNED = 16  # bytes: Triton compiles other kernels for addresses that are no multiples of it


class Launch:
    """A kernel with all but its tensors settled; called with them, in the kernel's order.

    Triton looks at every argument of every launch to find the compiled kernel that fits: up to 90 µs on a slow core.
    Here only dtypes and alignment can differ from one call to the next, so the kernel that the first call compiled
    serves later ones that agree in both.

    Args:
        kernel: a function of Triton.
        grid: programs along two axes.
        numbers: the arguments after the tensors, in order.
        constants: the compile-time arguments.
        warps: of a program.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, int], numbers: tuple[float, ...], constants: dict[str, Any], warps: int = 4
    ) -> None:
        self.kernel, self.grid, self.numbers, self.constants, self.warps = kernel, grid, numbers, constants, warps
        self._first = partial(kernel[grid], num_warps=warps, **constants)
        self._again: dict[tuple[torch.dtype, ...], _Compiled] = {}

    def __call__(self, *tensors: Tensor) -> None:
        """Launch the kernel in the current stream of the current device."""
        dtypes, addresses = tuple([t.dtype for t in tensors]), [t.data_ptr() for t in tensors]
        found, aligned = self._again.get(dtypes), reduce(or_, addresses) % ALIGNED == 0
        if found is not None and aligned:
            run, stream_of, settled, rest = found
            # Addresses, as Triton asks the driver for that of each tensor.
            run(*self.grid, 1, stream_of(tensors[0].get_device()), *settled, *addresses, *rest)
            return
        compiled = self._first(*tensors, *self.numbers)  # None in Triton's interpreter
        if compiled is None or found is not None or not aligned:
            return
        names = self.kernel.arg_names[len(tensors) + len(self.numbers) :]
        if _runs_directly() and all(name in self.constants for name in names):
            rest = (*self.numbers, *(self.constants[name] for name in names))
            self._again[dtypes] = _compiled(compiled, rest)


class _Compiled(NamedTuple):
    """A compiled kernel, as `run(*grid, stream, *settled, *addresses, *rest)` launches it."""

    run: Callable[..., None]
    stream_of: Callable[[int], int]
    settled: tuple[Any, ...]
    rest: tuple[Any, ...]


def _compiled(kernel: Any, rest: tuple[Any, ...]) -> _Compiled:
    from triton.runtime import driver

    # `kernel[grid](*tensors)` does the same, but first describes the launch to hooks, twice as long as it takes. A
    # profiler's hooks (those of Proton) do not hear of ours: None is in their place.
    settled = (kernel.function, kernel.packed_metadata, None, None, None)
    return _Compiled(kernel.run, driver.active.get_current_stream, settled, rest)


@cache
def _runs_directly() -> bool:
    """Return whether `run` of a compiled kernel is known to take these arguments: so it is in Triton 3.3 to 3.7."""
    return (3, 3) <= tuple(map(int, version("triton").split(".")[:2])) <= (3, 7)


def on_device(index: int) -> AbstractContextManager[Any]:
    """Return a context in which kernels run on a GPU; where there is one at most, that is always so."""
    return torch.cuda.device(index) if _several_gpus() else _NOTHING


_NOTHING = nullcontext()


@cache
def _several_gpus() -> bool:
    return torch.cuda.device_count() > 1


def halves(shape: Shape, groups: int) -> bool:
    """Return whether `kernels_halves` fit: one group, and as many channels with sines as with cosines."""
    return groups == 1 and shape.channels % 2 == 0


class Sums:
    """`square_sum` and its gradient for tensors of one shape and memory order."""

    def __init__(self, shape: Shape, groups: int, device: int, extra: float = 0.0) -> None:
        from undrift.kernels.triton import kernels_grouped, kernels_halves

        numbers: tuple[float, ...]
        if groups == 1:
            numbers = (shape.positions, shape.per_image, shape.channels)
            cut = tiles.tile(shape, shape.channels, tiles.processors(device))
            constants = {"LAST": shape.last, "WIDE": shape.wide, "BP": cut.positions, "WIDTH": cut.width}
            self.total = Launch(
                kernels_halves.square_sum_kernel, (cut.programs[0], 1), (extra, *numbers), constants
            )  # fmt: skip
            self.gradient = Launch(kernels_halves.square_sum_gradient_kernel, cut.programs, numbers, constants)
            return
        assert extra == 0, "a constant energy is added by the caller where there are groups"
        block, together, width = tiles.group_tile(shape, groups)
        members = shape.channels // groups
        numbers = (shape.positions, shape.per_image, members, groups, *tiles.group_strides(shape))
        constants = {"BP": block, "TOGETHER": together, "WIDTH": width}
        programs = cdiv(shape.positions, block) * cdiv(groups, together)
        self.total = Launch(kernels_grouped.grouped_square_sum_kernel, (programs, 1), numbers, constants)
        programs *= cdiv(members, width)
        self.gradient = Launch(kernels_grouped.grouped_square_sum_gradient_kernel, (programs, 1), numbers, constants)


class Noises:
    """`add_noise` and its gradients for tensors of one shape and memory order.

    Args:
        shape: of the output.
        groups: of channels.
        first: the number of the first row of ε.
        device: index of the GPU.
        runs: parts that a position's plane comes in, side by side.
    """

    def __init__(self, shape: Shape, groups: int, first: int, device: int, runs: int = 1) -> None:
        from undrift.kernels.triton import kernels_grouped, kernels_halves

        self.finish: Launch | None = None
        numbers: tuple[int, ...]
        if halves(shape, groups):
            half, gpus = shape.channels // 2, tiles.processors(device)
            numbers = (first, shape.positions, shape.per_image, half)
            cut = tiles.pair_tile(shape, half, gpus, ADDING)
            constants = {
                "LAST": shape.last, "WIDE": shape.wide, "BP": cut.positions, "WIDTH": cut.width, "RUNS": runs
            }  # fmt: skip
            self.add = Launch(kernels_halves.add_noise_kernel, cut.programs, numbers, constants, ADDING.warps)
            cut = tiles.pair_tile(shape, half, gpus, SUMMING)
            constants = constants | {"BP": cut.positions, "WIDTH": cut.width, "SLOPED": False}
            self.sums = Launch(
                kernels_halves.noise_gradients_kernel, cut.programs, numbers, constants, SUMMING.warps
            )  # fmt: skip
            parts, blocks = cut.programs
            self.partial: tuple[int, ...] = (blocks * shape.positions + parts * shape.channels,)
            programs = cdiv(shape.positions, FINISH["PLANE"]) + cdiv(shape.channels, FINISH["WIDTH"])
            counts = (shape.positions, shape.channels, blocks, parts)
            held = FINISH | {"BLOCKS": min(FINISH["BLOCKS"], tiles.power(blocks)), "RUNS": runs}
            self.finish = Launch(kernels_halves.finish_kernel, (programs, 1), counts, held, FINISHING)
            return
        block, together, width = tiles.group_tile(shape, groups)
        members = shape.channels // groups
        numbers = (first, shape.positions, shape.per_image, members, groups, *tiles.group_strides(shape))
        constants = {"BP": block, "TOGETHER": together, "WIDTH": width}
        rows = cdiv(shape.positions, block)
        programs = rows * cdiv(groups, together)
        self.partial = (rows, shape.channels)
        self.sums = Launch(kernels_grouped.grouped_noise_gradients_kernel, (programs, 1), numbers, constants)
        programs *= cdiv(members, width)
        self.add = Launch(kernels_grouped.grouped_add_noise_kernel, (programs, 1), numbers, constants)

    def gradients(self, grad: Tensor, plane: Tensor, log_var: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of plane and log_var."""
        grad_plane = torch.empty_like(plane)
        scratch = torch.empty(self.partial, dtype=torch.float32, device=plane.device)
        if self.finish is None:
            self.sums(grad, plane, log_var, key, grad_plane, scratch)
            return grad_plane, scratch.sum(0).to(log_var.dtype)
        grad_log_var = torch.empty_like(log_var)
        self.sums(grad, plane, log_var, key, scratch)
        self.finish(scratch, plane, grad_plane, grad_log_var)
        return grad_plane, grad_log_var


sums_of = lru_cache(SHAPES)(Sums)
noises_of = lru_cache(SHAPES)(Noises)


def first_of(size: torch.Size, first_row: int, last: bool) -> int:
    """Return the number of the first row of ε: an image's rows are its positions. A 32-bit word; rows wrap."""
    return signed(first_row * math.prod(size[1:-1] if last else size[2:]))


def energy_size(size: torch.Size, groups: int, last: bool) -> tuple[int, ...]:
    """Return the size of the energy of an input, or of an output's windows."""
    return (*size[:-1], 1) if last else (size[0], groups, *size[2:])


def keys(seed: Tensor, step: Tensor, count: int) -> Tensor:
    """Return what `undrift.kernels.epsilon.keys_of` does, bit for bit."""
    out = torch.empty(count, dtype=torch.int64, device=step.device)
    with on_device(step.get_device()):
        _keys_of(count, step.get_device())(seed, step, out)
    return out


@lru_cache(SHAPES)
def _keys_of(count: int, _device: int) -> Launch:
    from undrift.kernels.triton.kernels_keys import keys_kernel

    return Launch(keys_kernel, (cdiv(count, KEYS["BLOCK"]), 1), (count,), KEYS)


def square_sum(x: Tensor, groups: int, last: bool) -> Tensor:
    """Return Σ x² over each group's channels, in float32: batch × groups × positions (linear: …, 1)."""
    x = dense(x, last)
    out = x.new_empty(energy_size(x.shape, groups, last), dtype=torch.float32)
    if out.numel():
        with on_device(x.get_device()):
            sums_of(tiles.shape_of(x, last), groups, x.get_device()).total(x, out)
    return out


def square_sum_gradient(grad: Tensor, x: Tensor, groups: int, last: bool) -> Tensor:
    """Return 2·x·grad in x's dtype and memory format."""
    x = dense(x, last)
    out = torch.empty_like(x)
    if out.numel():
        with on_device(x.get_device()):
            sums_of(tiles.shape_of(x, last), groups, x.get_device()).gradient(x, grad.contiguous(), out)
    return out


def add_noise(
    y: Tensor, plane: Tensor, log_var: Tensor, key: Tensor, first_row: int, groups: int, last: bool
) -> Tensor:
    """Return y + σ·√plane·ε in y's dtype and memory format."""
    y = dense(y, last)
    out = torch.empty_like(y)
    if out.numel():
        noises = _noises(y, groups, last, first_row)
        with on_device(y.get_device()):
            noises.add(y, plane.contiguous(), log_var, key, out)
    return out


def noise_gradients(
    grad: Tensor, plane: Tensor, log_var: Tensor, key: Tensor, first_row: int, groups: int, last: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of plane and log_var for a gradient of `add_noise`'s output; ε is drawn again."""
    if not grad.numel():
        return torch.zeros_like(plane), torch.zeros_like(log_var)
    grad = dense(grad, last)
    noises = _noises(grad, groups, last, first_row)
    with on_device(grad.get_device()):
        return noises.gradients(grad, plane.contiguous(), log_var, key)


def _noises(y: Tensor, groups: int, last: bool, first_row: int) -> Noises:
    return noises_of(tiles.shape_of(y, last), groups, first_of(y.shape, first_row, last), y.get_device())
