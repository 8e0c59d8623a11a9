"""Sizes, memory order, tiles and programs of Triton's kernels for a tensor. Arithmetic only."""

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

_TILE = 2048  # numbers that a program holds at once: 16 a thread
VECTOR = 1024  # … where it holds them for a few positions only
_PROGRAMS = 8  # a multiprocessor: fewer leave it waiting for memory


class Shape(NamedTuple):
    """A tensor as positions × channels, and whether channels are neighbours in memory."""

    positions: int
    per_image: int
    channels: int
    last: bool

    @property
    def wide(self) -> bool:
        """Whether offsets need 64 bits."""
        return bool(self.positions * self.channels >= 2**31)  # sizes may be symbols, in a graph being compiled


def shape_of(tensor: Tensor, last: bool) -> Shape:
    """Return how a `dense` tensor is seen; sizes that are symbols stay so."""
    return seen(tensor.shape, last or tensor.is_contiguous(), last)


def seen(size: torch.Size, contiguous: bool, last: bool) -> Shape:
    """Return how a tensor of that size is seen, contiguous or with channels last in memory.

    A linear layer's positions are its vectors: images of one position each.
    """
    if last:
        return Shape(math.prod(size[:-1]), 1, size[-1], True)
    per_image = math.prod(size[2:])
    return Shape(size[0] * per_image, per_image, size[1], not contiguous)


@cache
def processors(index: int) -> int:
    """Return how many multiprocessors a GPU has."""
    if not torch.cuda.is_available():
        return 132
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def power(number: int) -> int:
    """Return the least power of two that is not below a number."""
    return 1 << (number - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


class Cut(NamedTuple):
    """How a kernel that draws ε is cut into programs.

    Attributes:
        pairs: of numbers that a program holds at once.
        warps: of a program.
        fit: programs that a multiprocessor of 65,536 registers holds at once (for sm_90), by the width of their tile.
    """

    pairs: int
    warps: int
    fit: dict[int, int]


class Tile(NamedTuple):
    """Positions and columns of a tile, and how many programs there are along each."""

    positions: int
    width: int
    programs: tuple[int, int]


def tile(shape: Shape, columns: int, gpus: int) -> Tile:
    """Return the tile for a pass over some columns per position (channels, or pairs of them), in a loop if need be."""
    width = width_of(shape, columns)
    block = _TILE // width
    wanted = _PROGRAMS * gpus
    while block > 16 and cdiv(shape.positions, block) * cdiv(columns, width) < wanted:
        block //= 2
    rows = cdiv(shape.positions, block)
    return Tile(block, width, (rows, min(cdiv(columns, width), cdiv(wanted, max(1, rows)))))


def pair_tile(shape: Shape, columns: int, gpus: int, cut: Cut) -> Tile:
    """Return the tile for ε: each program has one block of columns and loops over positions.

    There are no more programs than fit at once: one more would wait for all of them.
    """
    width = width_of(shape, columns, max(cut.fit))
    blocks = cdiv(columns, width)
    block = max(1, cut.pairs // width)
    wanted = cut.fit.get(width, min(cut.fit.values())) * gpus
    while block > 16 and cdiv(shape.positions, block) * blocks < wanted:
        block //= 2
    return Tile(block, width, (min(cdiv(shape.positions, block), max(1, wanted // blocks)), blocks))


def width_of(shape: Shape, columns: int, most: int = 64) -> int:
    """Return how many columns a tile has."""
    widest = most if shape.last else 8
    width = min(widest, columns & -columns)  # no empty columns: a network's widths are multiples of 32
    # Sixteen would be a pair of sectors at a time: 80 µs where a copy takes 33 (80 pairs of channels, on an H200).
    return width if width >= min(32, widest) else min(widest, power(min(columns, 32)))


def group_tile(shape: Shape, groups: int) -> tuple[int, int, int]:
    """Return positions, groups and channels of a group that a program of `kernels_grouped` holds at once."""
    members = shape.channels // groups
    along = shape.last or shape.per_image == 1
    width = min(128 if along else 16, power(members))
    while width > 32 and members % width:
        width //= 2
    together = min(power(groups), max(1, (32 if along else 8) // width))
    block = max(16, 2 * _TILE // (width * together))
    while block > 16 and shape.positions // block * (groups // together) < 512:
        block //= 2
    return block, together, width


def group_strides(shape: Shape) -> tuple[int, int, int]:
    """Return the strides of image, channel and position in the image."""
    numbers = shape.channels * shape.per_image
    return (numbers, 1, shape.channels) if shape.last else (numbers, shape.per_image, 1)
