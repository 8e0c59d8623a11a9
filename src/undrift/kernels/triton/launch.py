"""Call Triton's kernels on tensors. What follows from shapes alone is worked out once (`Sums`, `Noises`) and kept."""

import math
from typing import Any

import torch
from torch import Tensor

from undrift.kernels.epsilon import signed
from undrift.kernels.triton import tiles
from undrift.kernels.triton.calls import Call
from undrift.kernels.triton.tiles import Cut, Shape, cdiv

KEYS = {"BLOCK": 128}
FINISH = {"PLANE": 256, "BLOCKS": 8, "ROWS": 2048, "WIDTH": 4, "APART": 1, "RUNS": 1}
FINISHING = 8  # warps
# As many as an H200 was quickest with (benchmarks/NOTES.md, versions 13 and 14). Sums over channels make the warps of a
# program wait for each other at every step, so there programs are one warp.
ADDING = Cut(pairs=512, warps=2, fit={128: 14, 64: 14, 32: 14, 8: 12})
SUMMING = Cut(pairs=512, warps=1, fit={128: 16, 64: 16, 32: 16, 8: 12})


def halves(shape: Shape, groups: int) -> bool:
    """Return whether `kernels` fit: one group, and as many channels with sines as with cosines."""
    return groups == 1 and shape.channels % 2 == 0


class Sums:
    """`square_sum` and its gradient for tensors of one shape, dtype and memory order."""

    __slots__ = ("gradient", "total")

    def __init__(self, shape: Shape, groups: int, device: int, extra: float = 0.0) -> None:
        from undrift.kernels.triton import kernels_grouped, kernels_halves

        numbers: tuple[float, ...]
        if groups == 1:
            numbers = (shape.positions, shape.per_image, shape.channels)
            cut = tiles.tile(shape, shape.channels, tiles.processors(device))
            constants = {"LAST": shape.last, "WIDE": shape.wide, "BP": cut.positions, "WIDTH": cut.width}
            self.total = Call(
                kernels_halves.square_sum_kernel, (cut.programs[0], 1), (extra, *numbers), constants, device, (1,)
            )
            self.gradient = Call(
                kernels_halves.square_sum_gradient_kernel, cut.programs, numbers, constants, device, (2,)
            )
            return
        block, together, width = tiles.group_tile(shape, groups)
        members = shape.channels // groups
        numbers = (shape.positions, shape.per_image, members, groups, *tiles.group_strides(shape))
        constants = {"BP": block, "TOGETHER": together, "WIDTH": width}
        programs = cdiv(shape.positions, block) * cdiv(groups, together)
        assert extra == 0, "a constant energy is added by the caller where there are groups"
        self.total = Call(kernels_grouped.grouped_square_sum_kernel, (programs, 1), numbers, constants, device, (1,))
        programs *= cdiv(members, width)
        self.gradient = Call(
            kernels_grouped.grouped_square_sum_gradient_kernel, (programs, 1), numbers, constants, device, (2,)
        )


class Noises:
    """`add_noise` and its gradients for tensors of one shape, dtype and memory order.

    Args:
        shape: of the output.
        groups: of channels.
        first: the number of the first row of ε.
        device: index of the GPU.
        runs: parts that a position's plane comes in, side by side.
    """

    __slots__ = ("add", "finish", "partial", "shape", "sums")

    def __init__(self, shape: Shape, groups: int, first: int, device: int, runs: int = 1) -> None:
        from undrift.kernels.triton import kernels_grouped, kernels_halves

        self.shape = shape
        self.finish: Call | None = None
        numbers: tuple[int, ...]
        if halves(shape, groups):
            half, gpus = shape.channels // 2, tiles.processors(device)
            numbers = (first, shape.positions, shape.per_image, half)
            cut = tiles.pair_tile(shape, half, gpus, ADDING)
            constants = {
                "LAST": shape.last, "WIDE": shape.wide, "BP": cut.positions, "WIDTH": cut.width, "RUNS": runs
            }  # fmt: skip
            self.add = Call(
                kernels_halves.add_noise_kernel, cut.programs, numbers, constants, device, (4,), ADDING.warps
            )
            cut = tiles.pair_tile(shape, half, gpus, SUMMING)
            constants = constants | {"BP": cut.positions, "WIDTH": cut.width, "SLOPED": False}
            self.sums = Call(
                kernels_halves.noise_gradients_kernel, cut.programs, numbers, constants, device, (4,), SUMMING.warps
            )
            parts, blocks = cut.programs
            self.partial: tuple[int, ...] = (blocks * shape.positions + parts * shape.channels,)
            programs = cdiv(shape.positions, FINISH["PLANE"]) + cdiv(shape.channels, FINISH["WIDTH"])
            counts = (shape.positions, shape.channels, blocks, parts)
            held = FINISH | {"BLOCKS": min(FINISH["BLOCKS"], tiles.power(blocks)), "RUNS": runs}
            self.finish = Call(kernels_halves.finish_kernel, (programs, 1), counts, held, device, (2, 3), FINISHING)
            return
        block, together, width = tiles.group_tile(shape, groups)
        members = shape.channels // groups
        numbers = (first, shape.positions, shape.per_image, members, groups, *tiles.group_strides(shape))
        constants = {"BP": block, "TOGETHER": together, "WIDTH": width}
        rows = cdiv(shape.positions, block)
        programs = rows * cdiv(groups, together)
        self.partial = (rows, shape.channels)
        self.sums = Call(
            kernels_grouped.grouped_noise_gradients_kernel, (programs, 1), numbers, constants, device, (4, 5)
        )
        programs *= cdiv(members, width)
        self.add = Call(kernels_grouped.grouped_add_noise_kernel, (programs, 1), numbers, constants, device, (4,))

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


_sums: dict[object, Sums] = {}
_noises: dict[object, Noises] = {}
_keys: dict[object, Call] = {}
_MOST = 4096  # plans; a program that sees more shapes than that starts again


def keep(among: dict[Any, Any], key: object, plan: object) -> None:
    """Keep a plan; all others are forgotten when there are too many."""
    if len(among) >= _MOST:
        among.clear()
    among[key] = plan


def sums_of(x: Tensor, groups: int, last: bool, extra: float = 0.0) -> Sums:
    """Return the plan for a dense tensor."""
    key = (x.shape, x.stride(), x.dtype, x.get_device(), groups, last, extra)
    found = _sums.get(key)
    if found is None:
        found = Sums(tiles.shape_of(x, last), groups, x.get_device(), extra)
        keep(_sums, key, found)
    return found


def keys(seed: Tensor, step: Tensor, count: int) -> Tensor:
    """Return what `undrift.posterior.seeds.keys_of` does, bit for bit."""
    out = torch.empty(count, dtype=torch.int64, device=step.device)
    found = _keys.get((count, step.get_device()))
    if found is None:
        from undrift.kernels.triton import kernels_keys

        programs, constants = cdiv(count, KEYS["BLOCK"]), KEYS
        found = Call(kernels_keys.keys_kernel, (programs, 1), (count,), constants, step.get_device(), (2,))
        keep(_keys, (count, step.get_device()), found)
    found(seed, step, out)
    return out


def first_of(y: Tensor, first_row: int, last: bool) -> int:
    """Return the number of the first row of ε: an image's rows are its positions. A 32-bit word; rows wrap."""
    return signed(first_row * math.prod(y.shape[1:-1] if last else y.shape[2:]))


def noises_of(y: Tensor, groups: int, last: bool, first_row: int, log_var: Tensor) -> Noises:
    """Return the plan for a dense tensor, whose first row is the first_row-th of the whole batch."""
    key = (y.shape, y.stride(), y.dtype, y.get_device(), groups, last, first_row, log_var.dtype)
    found = _noises.get(key)
    if found is None:
        found = Noises(tiles.shape_of(y, last), groups, first_of(y, first_row, last), y.get_device())
        keep(_noises, key, found)
    return found


def square_sum(x: Tensor, groups: int, last: bool) -> Tensor:
    """Return Σ x² over each group's channels, in float32: batch × groups × positions (linear: …, 1)."""
    x = tiles.dense(x, last)
    out = x.new_empty((*x.shape[:-1], 1) if last else (x.shape[0], groups, *x.shape[2:]), dtype=torch.float32)
    if out.numel():
        sums_of(x, groups, last).total(x, out)
    return out


def square_sum_gradient(grad: Tensor, x: Tensor, groups: int, last: bool) -> Tensor:
    """Return 2·x·grad in x's dtype and memory format."""
    x = tiles.dense(x, last)
    out = torch.empty_like(x)
    if out.numel():
        sums_of(x, groups, last).gradient(x, grad.contiguous(), out)
    return out


def add_noise(
    y: Tensor, plane: Tensor, log_var: Tensor, key: Tensor, first_row: int, groups: int, last: bool
) -> Tensor:
    """Return y + σ·√plane·ε in y's dtype and memory format."""
    y = tiles.dense(y, last)
    out = torch.empty_like(y)
    if out.numel():
        noises_of(y, groups, last, first_row, log_var).add(y, plane.contiguous(), log_var, key, out)
    return out


def noise_gradients(
    grad: Tensor, plane: Tensor, log_var: Tensor, key: Tensor, first_row: int, groups: int, last: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of plane and log_var for a gradient of `add_noise`'s output; ε is drawn again."""
    if not grad.numel():
        return torch.zeros_like(plane), torch.zeros_like(log_var)
    grad = tiles.dense(grad, last)
    return noises_of(grad, groups, last, first_row, log_var).gradients(grad, plane.contiguous(), log_var, key)
