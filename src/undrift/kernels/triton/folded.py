"""The calls of `kernels_layer`, for layers of one group: all that follows from a layer's shapes, worked out once."""

from typing import NamedTuple

import torch
from torch import Tensor

from undrift.kernels.triton import launch, tiles
from undrift.kernels.triton.calls import Call, in_turn
from undrift.kernels.triton.tiles import Cut, Shape, Tile, cdiv, power

MOST = 9  # numbers that a kernel adds up for each position: 3×3. A larger box filter is quicker as a kernel of its own
PLANE = {"PLANE": 256}
VECTORS = Cut(pairs=512, warps=4, fit={64: 8, 32: 8})
WINDOWED = Cut(pairs=1024, warps=4, fit={64: 8, 32: 8})  # each position is summed once for all its pairs
PARTS = {"ROWS": 256, "COLUMNS": 8}  # as many registers as the kernel's other programs want
POSITIONS = 128  # of an input, at most, to a program: with more of them windows take 96 registers a thread
# Each program adds up what its positions get, from all blocks of channels: numbers that it holds at once, and that all
# programs read where x is small. With more, kernels of their own are quicker.
HELD, READ = 2048, 1 << 23


class Windows(NamedTuple):
    """A box filter and the pictures before and behind it.

    Attributes:
        pool: window, stride and padding, each down and across; () where a window is one input.
        rows, columns: of an input.
        out_rows, across: rows and columns of an output.
    """

    pool: tuple[tuple[int, ...], ...]
    rows: int
    columns: int
    out_rows: int
    across: int

    @property
    def held(self) -> int:
        """How many inputs a window has."""
        return self.pool[0][0] * self.pool[0][1] if self.pool else 1

    @property
    def holding(self) -> int:
        """How many windows hold an input, at most."""
        if not self.pool:
            return 1
        (high, wide), (down, right), _ = self.pool
        return cdiv(high, down) * cdiv(wide, right)

    @property
    def constants(self) -> dict[str, int]:
        """Return what the kernels are compiled for."""
        numbers = [number for pair in self.pool or ((1, 1), (1, 1), (0, 0)) for number in pair]
        return dict(zip(("KH", "KW", "SH", "SW", "PH", "PW"), numbers, strict=True))


def windows_of(x: Tensor, y: Tensor, pool: tuple[tuple[int, ...], ...]) -> Windows:
    """Return a layer's box filter."""
    return Windows(pool, *x.shape[2:], *y.shape[2:]) if pool else Windows((), 1, 1, 1, 1)


def adding(shape: Shape, windows: Windows, first: int, device: int) -> Call | None:
    """Return what filters the energy and adds noise: y, energy, log_var, key, out, plane. None: that is not one."""
    from undrift.kernels.triton import kernels_layer

    if not windows.pool or windows.held > MOST:
        return None
    half, gpus = shape.channels // 2, tiles.processors(device)
    cut = tiles.pair_tile(shape, half, gpus, WINDOWED)
    # Channels that are not read sixteen at a time take 102 registers a thread: fine for as many programs as fit then.
    if shape.last and half % 16 and cut.programs[0] * cut.programs[1] > 4 * gpus:
        return None
    pictures = (windows.across, windows.rows, windows.columns)
    numbers = (first, shape.positions, shape.per_image, half, *pictures)
    constants = {
        "LAST": shape.last, "WIDE": shape.wide, "BP": cut.positions, "WIDTH": cut.width, **PLANE, **windows.constants
    }  # fmt: skip
    kernel, warps = kernels_layer.add_noise_windowed_kernel, WINDOWED.warps
    return Call(kernel, cut.programs, numbers, constants, device, (4, 5), warps)


def joining(given: Shape, shape: Shape, extra: float, first: int, device: int) -> Call | None:
    """Return what sums over an input's channels and adds noise: x, y, log_var, key, out, plane. None: that is not one.

    Args:
        given: the input.
        shape: the output, each of whose positions is made of one of the input's.
        extra: a constant energy.
        first: the number of the first row of ε.
        device: index of the GPU.
    """
    from undrift.kernels.triton import kernels_layer

    half, gpus = shape.channels // 2, tiles.processors(device)
    width = tiles.width_of(shape, half, max(VECTORS.fit))
    block = max(1, VECTORS.pairs // width)
    # Few positions (a head's) would be a program or two, one after the other through all channels.
    if not given.last or not shape.last or cdiv(shape.positions, block) < gpus:
        return None
    blocks, wanted = 4, VECTORS.fit.get(width, min(VECTORS.fit.values())) * gpus
    while blocks > 1 and cdiv(shape.positions, block * blocks) < wanted:
        blocks //= 2
    constants = {
        "WIDE": given.wide or shape.wide, "BP": block, "WIDTH": width, "INPUTS": tiles.VECTOR // block, "BLOCKS": blocks
    }  # fmt: skip
    numbers = (extra, first, shape.positions, shape.per_image, half, given.channels)
    programs = (cdiv(shape.positions, block * blocks), 1)
    kernel = kernels_layer.add_noise_vectors_kernel
    return Call(kernel, programs, numbers, constants, device, (4, 5), VECTORS.warps)


class Pulls:
    """The gradients of a layer's input and log-variances, for tensors of one shape, dtype and memory order.

    Args:
        given: the input.
        shape: the output.
        one: a number in float32, where both are.
    """

    __slots__ = ("added", "both", "log_var", "scratch", "sums")

    def __init__(self, given: Shape, shape: Shape, windows: Windows, first: int, device: int, one: Tensor) -> None:
        from undrift.kernels.triton import kernels_halves, kernels_layer

        gpus, half = tiles.processors(device), shape.channels // 2
        cut = tiles.pair_tile(shape, half, gpus, launch.SUMMING)
        constants = {
            "LAST": shape.last, "WIDE": shape.wide, "BP": cut.positions, "WIDTH": cut.width, "RUNS": 1, "SLOPED": True
        }  # fmt: skip
        numbers = (first, shape.positions, shape.per_image, half)
        kernel, warps = kernels_halves.noise_gradients_kernel, launch.SUMMING.warps
        self.sums = Call(kernel, cut.programs, numbers, constants, device, (4,), warps)
        parts, blocks = cut.programs
        self.scratch = one.expand(blocks * shape.positions + parts * shape.channels)
        rows = (shape.positions, shape.channels, blocks, parts)
        groups = cdiv(shape.channels, PARTS["COLUMNS"])
        self.log_var = Call(kernels_layer.finish_log_var_kernel, (groups, 1), rows, PARTS, device, (1,))
        cut = input_tile(given, gpus)
        constants = {
            "OWN": False, **PARTS, "BLOCKS": power(blocks), "SPLIT": cut.programs[1],
            "LAST": given.last, "WIDE": given.wide, "BP": cut.positions, "WIDTH": cut.width, **windows.constants,
        }  # fmt: skip
        sizes = (given.positions, given.per_image, given.channels, windows.columns, windows.out_rows, windows.across)
        programs = groups + cut.programs[0] * cut.programs[1]
        self.both, self.added = (
            Call(
                kernels_layer.finish_layer_kernel, (programs, 1), (*rows, groups, *sizes),
                constants | {"OWN": own}, device, (3, 4),
            )
            for own in (False, True)
        )  # fmt: skip

    def of(
        self,
        grad: Tensor,
        x: Tensor | None,
        plane: Tensor,
        log_var: Tensor,
        key: Tensor,
        own: Tensor | None,
        grad_log_var: Tensor,
    ) -> Tensor | None:
        """Return the gradient of x, where it is given, and write log_var's; x's `own` is added, and may be lost."""
        scratch = torch.empty_like(self.scratch)
        first = (grad, plane, log_var, key, scratch)
        if x is None:
            in_turn(self.sums, first, self.log_var, (scratch, grad_log_var))
            return None
        if own is None:
            grad_x = torch.empty_like(x)
            in_turn(self.sums, first, self.both, (x, scratch, x, grad_x, grad_log_var))
            return grad_x
        # In place, once the kernel need not be tried again with what it has read.
        grad_x = own if self.added.tried and own.dtype == x.dtype else torch.empty_like(x)
        in_turn(self.sums, first, self.added, (x, scratch, own, grad_x, grad_log_var))
        return grad_x


def input_tile(given: Shape, gpus: int) -> Tile:
    """Return the tile of a pass over the input."""
    cut = tiles.tile(given, given.channels, gpus)
    block = min(cut.positions, POSITIONS)
    return Tile(block, cut.width, (cdiv(given.positions, block), cut.programs[1]))


def pays(given: Shape, shape: Shape, holding: int, gpus: int) -> bool:
    """Return whether the programs that write an input's gradient may each add up what its own positions get."""
    blocks = tiles.pair_tile(shape, shape.channels // 2, gpus, launch.SUMMING).programs[1]
    cut = input_tile(given, gpus)
    read = given.positions * holding * blocks * cut.programs[1]
    few = read <= max(2 * given.positions * given.channels, READ)
    return holding <= MOST and few and cut.positions * power(blocks) <= HELD


def pulls_of(x: Tensor, y: Tensor, last: bool, windows: Windows, first: int) -> Pulls | None:
    """Return the plan for a layer's gradients, None where more kernels are quicker."""
    given, shape, device = tiles.shape_of(x, last), tiles.shape_of(y, last), y.get_device()
    if not pays(given, shape, windows.holding, tiles.processors(device)):
        return None
    return Pulls(given, shape, windows, first, device, y.new_empty(1, dtype=torch.float32))


def fits(y: Tensor, groups: int, last: bool) -> bool:
    """Return whether these kernels serve such an output."""
    return launch.halves(tiles.shape_of(y, last), groups)
