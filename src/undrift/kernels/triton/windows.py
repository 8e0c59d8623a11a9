"""Launch `kernels_layer`, for layers of one group, with the box filter fused into the kernel that uses it."""

from typing import NamedTuple

from undrift.kernels.triton import launch, tiles
from undrift.kernels.triton.launch import Launch
from undrift.kernels.triton.tiles import Cut, Shape, Tile, cdiv, power

MOST = 9  # numbers that a kernel adds up for each position: 3×3. A larger box filter is quicker as a kernel of its own
PLANE = {"PLANE": 256}
VECTORS = Cut(pairs=512, warps=4, fit={64: 8, 32: 8})
WINDOWED = Cut(pairs=1024, warps=4, fit={64: 8, 32: 8})  # each position is summed once for all its pairs
PARTS = {"ROWS": 256, "COLUMNS": 8}  # as many registers as the kernel's other programs want
POSITIONS = 128  # of an input, at most, to a program: with more of them windows take 96 registers per thread
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


def windowed(shape: Shape, windows: Windows, first: int, device: int) -> Launch | None:
    """Return what filters the energy and adds noise: y, energy, log_var, key, out, plane. None: that is not one."""
    from undrift.kernels.triton import kernels_layer

    if not windows.pool or windows.held > MOST:
        return None
    half, gpus = shape.channels // 2, tiles.processors(device)
    cut = tiles.pair_tile(shape, half, gpus, WINDOWED)
    # Channels that are not read sixteen at a time take 102 registers per thread: fine for as many programs as fit then.
    if shape.last and half % 16 and cut.programs[0] * cut.programs[1] > 4 * gpus:
        return None
    pictures = (windows.across, windows.rows, windows.columns)
    numbers = (first, shape.positions, shape.per_image, half, *pictures)
    constants = {
        "LAST": shape.last, "WIDE": shape.wide, "BP": cut.positions, "WIDTH": cut.width, **PLANE, **windows.constants
    }  # fmt: skip
    return Launch(kernels_layer.add_noise_windowed_kernel, cut.programs, numbers, constants, WINDOWED.warps)


def pointwise(given: Shape, shape: Shape, extra: float, first: int, device: int) -> Launch | None:
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
    return Launch(kernels_layer.add_noise_vectors_kernel, programs, numbers, constants, VECTORS.warps)


class Pulls(NamedTuple):
    """Launches for the gradients of a layer's input and log-variances.

    Attributes:
        sums: grad, plane, log_var, key, scratch.
        both: x, scratch, nothing that is looked at, grad_x, grad_log_var.
        added: the same, with a gradient of x in the third place, which is added to it.
        log_var: scratch, grad_log_var; where x wants no gradient.
        scratch: how many float32 numbers that has.
    """

    sums: Launch
    both: Launch
    added: Launch
    log_var: Launch
    scratch: int


def pulls_of(given: Shape, shape: Shape, windows: Windows, first: int, device: int) -> Pulls | None:
    """Return the launches for an input's gradient, None where more kernels are quicker."""
    from undrift.kernels.triton import kernels_halves, kernels_layer

    gpus, half = tiles.processors(device), shape.channels // 2
    if not pays(given, shape, windows.holding, gpus):
        return None
    cut = tiles.pair_tile(shape, half, gpus, launch.SUMMING)
    constants = {
        "LAST": shape.last, "WIDE": shape.wide, "BP": cut.positions, "WIDTH": cut.width, "RUNS": 1, "SLOPED": True
    }  # fmt: skip
    numbers = (first, shape.positions, shape.per_image, half)
    sums = Launch(kernels_halves.noise_gradients_kernel, cut.programs, numbers, constants, launch.SUMMING.warps)
    parts, blocks = cut.programs
    rows = (shape.positions, shape.channels, blocks, parts)
    groups = cdiv(shape.channels, PARTS["COLUMNS"])
    log_var = Launch(kernels_layer.finish_log_var_kernel, (groups, 1), rows, PARTS)
    cut = input_tile(given, gpus)
    constants = {
        **PARTS, "BLOCKS": power(blocks), "SPLIT": cut.programs[1],
        "LAST": given.last, "WIDE": given.wide, "BP": cut.positions, "WIDTH": cut.width, **windows.constants,
    }  # fmt: skip
    sizes = (given.positions, given.per_image, given.channels, windows.columns, windows.out_rows, windows.across)
    programs = groups + cut.programs[0] * cut.programs[1]
    both, added = (
        Launch(kernels_layer.finish_layer_kernel, (programs, 1), (*rows, groups, *sizes), constants | {"ADDED": more})
        for more in (False, True)
    )
    return Pulls(sums, both, added, log_var, blocks * shape.positions + parts * shape.channels)


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
