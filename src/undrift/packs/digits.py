"""Store small whole numbers as digits in bytes: packed for fast lookup in memory, coded to be short in a file.

Several digits of base `levels` share a byte: eight of two levels, five of three, two of fifteen, one of more. Large
numbers are rare, so a file may use digits of a smaller, odd base, in which the outermost two mean "this much or more",
and store the excess in separate bytes. A Huffman code shortens both.
"""

import zlib
from functools import lru_cache

import torch
from torch import Tensor

BASES = (3, 5, 15)
"""That fill a byte well: 243, 125 and 225 of its 256 values."""


def per_byte(levels: int) -> int:
    """Return how many digits of this base a byte holds.

    Examples:
        >>> [per_byte(levels) for levels in (2, 3, 7, 15, 255)]
        [8, 5, 2, 2, 1]
    """
    return next(count for count in range(8, 0, -1) if levels**count <= 256)


def packed(digits: Tensor, levels: int) -> Tensor:
    """Return digits packed into bytes, the first digit of a byte being its most significant."""
    count, digits = per_byte(levels), digits.to(torch.uint8)
    padded = torch.cat([digits, digits.new_full((-len(digits) % count,), levels // 2)]).view(-1, count)
    bytes_ = torch.zeros_like(padded[:, 0])
    for place in range(count):
        bytes_ = bytes_ * levels + padded[:, place]
    return bytes_


def numbers(plain: Tensor, levels: int, count: int, dtype: torch.dtype) -> Tensor:
    """Unpack digits into numbers around 0, as a new tensor."""
    if per_byte(levels) == 1 and levels % 2:
        return plain[:count].to(dtype, copy=True).sub_(levels // 2)
    return _table(levels, plain.device, dtype).index_select(0, plain.int()).view(-1)[:count]


@lru_cache(maxsize=32)
def _table(levels: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the digits that each byte stands for, around 0: 256 rows."""
    byte, count = torch.arange(256), per_byte(levels)
    digits = [byte // levels**place % levels for place in reversed(range(count))]
    return (torch.stack(digits, 1) - (levels - 1) / 2).to(device, dtype)


def shortest(plain: Tensor, levels: int, count: int) -> tuple[dict[str, Tensor], int]:
    """Return packed digits as the file holds them, and the base that was shortest there."""
    found = [({"digits": _coded(plain)}, levels)]
    if levels % 2:
        whole = numbers(plain, levels, count, torch.int32)
        for base in (base for base in BASES if base < levels):
            most = base // 2
            near = whole.clamp(-most, most)
            parts = {"digits": _coded(packed(near + most, base))}
            found.append((parts | {"beyond": _coded((whole.abs() - most)[near.abs() == most])}, base))
    return min(found, key=lambda one: sum(len(part) for part in one[0].values()))


def restored(parts: dict[str, Tensor], base: int, levels: int, count: int) -> Tensor:
    """Return the packed digits that a file holds; raise ValueError where they do not fit together."""
    digits = _decoded(parts["digits"], -(-count // per_byte(base)), base ** per_byte(base))
    if base == levels:
        return digits
    most, found = base // 2, numbers(digits, base, count, torch.int32)
    outside = found.abs() == most
    beyond = _decoded(parts["beyond"], int(outside.sum()), levels // 2 - most + 1)
    found[outside] += found[outside].sign() * beyond.int()
    return packed(found + levels // 2, levels)


def _coded(plain: Tensor) -> Tensor:
    """Return bytes Huffman-coded, where that is shorter."""
    whole = plain.to("cpu", torch.uint8).contiguous().numpy().tobytes()
    found = [whole]
    # Runs of one byte are worth looking for only where nearly everything is 0.
    for strategy in (zlib.Z_HUFFMAN_ONLY, zlib.Z_RLE):
        coder = zlib.compressobj(9, zlib.DEFLATED, -15, 9, strategy)
        found.append(coder.compress(whole) + coder.flush())
    shorter = min(found, key=len)
    return torch.frombuffer(bytearray(shorter), dtype=torch.uint8) if shorter else plain.new_empty(0).to(torch.uint8)


def _decoded(coded: Tensor, length: int, values: int) -> Tensor:
    """Return so many bytes below `values`; never more, whatever the file says."""
    digits = coded
    if coded.numel() < length:  # coded, as what is not shorter is stored plain
        decoder = zlib.decompressobj(-15)
        try:
            plain = decoder.decompress(coded.numpy().tobytes(), length + 1)
        except zlib.error as error:
            raise ValueError(f"its digits cannot be decoded: {error}") from error
        digits = torch.frombuffer(bytearray(plain), dtype=torch.uint8) if plain else coded.new_empty(0)
    if digits.numel() != length or (length and int(digits.max()) >= values):
        raise ValueError("its digits do not fit its shape and levels")
    return digits
