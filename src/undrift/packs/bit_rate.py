"""Choose the steps of all trained weights together, so that they take a given number of bits per weight.

    step[k] = f · ‖w[k]‖,   w[k] the source's kernel k, one f for the whole network

If a kernel's output is normalised, an error does harm relative to the kernel's norm. The errors of a kernel's weights
add up to one error of its output, while each weight costs bits, so fewer bits per weight do least harm in kernels with
many weights. Kernels that hardly moved get almost no bits.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from undrift.packs.quantized import QuantizedShift, quantize
from undrift.packs.shift import Shift, as_rows

Pairs = Mapping[str, tuple[Tensor, Tensor]]
"""Source and adapted value of weights, by name."""

SAMPLE = 100_000
"""Weights of a layer by which its bits are estimated; the first and last of them are far apart."""

FINEST, COARSEST = -24.0, 8.0
"""Of log₂ f."""

OVERHEAD = 1.025
"""What a Huffman code of whole bytes takes more than the entropy, at one bit per weight or more."""

STEP = 16
"""Bits of one kernel's step in the file."""

ROUNDS = 16
"""Halvings between these; what is left is less than a thousandth of a step."""


def each(pairs: Pairs, by: Callable[[Tensor], Shift]) -> dict[str, Shift]:
    """Return the shifts of weights, each compressed by itself."""
    return {name: by(_shift(*pair)) for name, pair in pairs.items()}


def at_rate(pairs: Pairs, bits: float) -> dict[str, Shift]:
    """Return shifts that take at most so many bits per weight, entropy-coded, on the mean of all weights."""
    norms = {name: as_rows(source).norm(dim=1) for name, (source, _) in pairs.items()}
    few = {name: _sample(as_rows(_shift(*pair)), norms[name]) for name, pair in pairs.items()}
    sizes = {name: source.numel() for name, (source, _) in pairs.items()}
    whole = bits * sum(sizes.values())
    # Kernels of a few weights, as in depthwise layers, keep half of it for the weights all the same.
    wanted = max(whole / 2, whole - STEP * sum(len(norm) for norm in norms.values()))

    def taken(factor: float) -> float:
        return OVERHEAD * sum(sizes[name] * _entropy(rows, factor * norm) for name, (rows, norm) in few.items())

    low, high = FINEST, COARSEST
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        low, high = (low, middle) if taken(2**middle) <= wanted else (middle, high)
    return {name: QuantizedShift.at(_shift(*pair), 2**high * norms[name]) for name, pair in pairs.items()}


def _shift(source: Tensor, adapted: Tensor) -> Tensor:
    return adapted.detach().double() - source.detach().double()


def _sample(rows: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
    stride = max(1, rows.numel() // SAMPLE)
    return rows[::stride], norm[::stride]


def _entropy(rows: Tensor, step: Tensor) -> float:
    """Return the bits that a code of the multiples takes per weight."""
    c, _ = quantize(rows, step)
    counts = torch.bincount((c - c.min()).long().flatten()).double()
    part = counts[counts > 0] / c.numel()
    return float(-(part * part.log2()).sum()) if len(part) > 1 else 0.0
