"""Compress the shifts of all trained weights by a named scheme.

benchmarks/compression.py compares the schemes: docs/explanation/packs.md.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from undrift._errors import OptionError
from undrift.options import _suggest
from undrift.packs.quantized import QuantizedShift, quantize
from undrift.packs.shift import Shift, as_rows, only, row_length
from undrift.posterior.perturbed import Perturbed


class LowRankShift(Shift):
    """A shift of low rank: factors of 8 bits with one scale per component, or of 32 bits.

        shift ≈ rows · diag(scale) · columns,   rows: kernels × rank,   columns: rank × weights of a kernel

    The factors are the largest singular values', or those of a mean that was learned as a product.
    """

    kind = "low-rank"

    def __init__(self, rows: Tensor, scale: Tensor, columns: Tensor, shape: tuple[int, ...]) -> None:
        self.rows, self.scale, self.columns, self.shape = rows, scale, columns, shape

    @classmethod
    def of(cls, shift: Tensor, rank: int) -> "LowRankShift":
        """Return the `rank` largest singular values of a shift, its factors rounded to 8 bits."""
        u, s, v = torch.linalg.svd(as_rows(shift), full_matrices=False)
        kept = min(rank, len(s))
        root = s[:kept].sqrt()
        return cls.from_factors(u[:, :kept] * root, root.unsqueeze(1) * v[:kept], tuple(shift.shape)).rounded()

    @classmethod
    def from_factors(cls, rows: Tensor, columns: Tensor, shape: tuple[int, ...]) -> "LowRankShift":
        """Return the shift rows · columns, exactly: for a mean that was learned as two factors."""
        wide = [factor.detach().to(torch.float32).contiguous() for factor in (rows, columns)]
        return cls(wide[0], wide[0].new_ones(rows.shape[1]), wide[1], shape)

    def rounded(self) -> "LowRankShift":
        """Return it with factors of 8 bits, each component scaled to its largest entry."""
        highs = [self.rows.abs().amax(0), self.columns.abs().amax(1)]
        a, b = (high.clamp(min=torch.finfo(torch.float32).tiny) / 127 for high in highs)
        rows, columns = (self.rows / a).round(), (self.columns / b.unsqueeze(1)).round()
        return LowRankShift(rows.to(torch.int8), self.scale * a * b, columns.to(torch.int8), self.shape)

    def to(self, device: torch.device | str) -> "LowRankShift":
        """Return the same shift on a device."""
        return LowRankShift(self.rows.to(device), self.scale.to(device), self.columns.to(device), self.shape)

    def tensors(self) -> dict[str, Tensor]:
        """Return factors and scales."""
        return {"rows": self.rows, "scale": self.scale, "columns": self.columns}

    def added_to(self, source: Tensor) -> Tensor:
        """Return source + shift."""
        wide = torch.promote_types(source.dtype, torch.float32)
        rows = self.rows.to(wide) * self.scale.to(wide)
        base = source.detach().to(wide).reshape(self.shape[0], -1)
        return torch.addmm(base, rows, self.columns.to(wide)).view(self.shape).to(source.dtype)

    def stored(self) -> dict[str, Tensor]:
        """Return factors and scales."""
        return {name: tensor.cpu().contiguous() for name, tensor in self.tensors().items()}

    def described(self) -> dict[str, Any]:
        """Return nothing: the tensors say it all."""
        return {}

    @classmethod
    def read(cls, shape: tuple[int, ...], described: Mapping[str, Any], stored: Mapping[str, Tensor]) -> "LowRankShift":
        """Return the shift that a file describes."""
        del described
        found = stored.get("rows")
        dtype = torch.int8 if found is not None and found.dtype == torch.int8 else torch.float32
        rank = 0 if found is None or found.ndim != 2 else found.shape[1]
        rows, scale, columns = only(
            stored,
            rows=(dtype, (shape[0], rank)),
            scale=(torch.float32, (rank,)),
            columns=(dtype, (rank, row_length(shape))),
        )
        return cls(rows, scale, columns, shape)


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
    """Return shifts that take at most so many bits per weight, entropy-coded, on the mean of all weights.

        step[k] = f · ‖w[k]‖,   w[k] the source's kernel k, one f for the whole network

    If a kernel's output is normalised, an error does harm relative to the kernel's norm. The errors of a kernel's
    weights add up to one error of its output, while each weight costs bits, so fewer bits per weight do least harm in
    kernels with many weights. Kernels that hardly moved get almost no bits.
    """
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


EXACT = "exact"
DEFAULT = "auto"
LARGE, SMALL = "1.5-bit", "4-bit"
"""What "auto" takes: a small network's file is small anyway."""
ENOUGH = 1_000_000
"""Trained weights from which on a network is large."""
MOST_BITS = 8.0

LEVELS: Mapping[str, Callable[[Tensor], Shift]] = {
    "signs": partial(QuantizedShift.of, levels=2),
    "ternary": partial(QuantizedShift.of, levels=3, dead_zone=0.6),
}
RATE = re.compile(r"(\d+(?:\.\d+)?)-bit")
RANK = re.compile(r"rank-([1-9]\d*)")

LEAST = 4096
"""Smaller weights stay exact: they are many in name only, and a first layer with its few weights counts most."""

Compressor = Callable[[Pairs], dict[str, Shift]]


def compressor(scheme: str) -> Compressor | None:
    """Return what compresses shifts by this scheme, or None for "exact"; raise where there is no such scheme."""
    if scheme == EXACT:
        return None
    name = LARGE if scheme == DEFAULT else str(scheme)
    if name in LEVELS:
        return partial(each, by=LEVELS[name])
    if found := RANK.fullmatch(name):
        return partial(each, by=partial(LowRankShift.of, rank=int(found[1])))
    if (found := RATE.fullmatch(name)) and 0 < float(found[1]) <= MOST_BITS:
        return partial(at_rate, bits=float(found[1]))
    known = (DEFAULT, EXACT, "1-bit", "1.5-bit", "4-bit", *LEVELS, "rank-8")
    raise OptionError(
        f"mean={scheme!r}{_suggest(str(scheme), known)} is no way to store trained weights; needed: one of "
        f"{', '.join(known)} (any rank, and any number of bits up to {MOST_BITS:.0f}). Take {EXACT} to keep them bit "
        "for bit, or leave it out."
    )


@torch.no_grad()
def mean_shifts(model: Perturbed, scheme: str) -> dict[str, Shift]:
    """Return the compressed shifts of a network's trained weights by name; what is small or a vector has none."""
    found = trained_weights(model)
    if scheme == DEFAULT:
        scheme = LARGE if sum(adapted.numel() for _, adapted in found.values()) >= ENOUGH else SMALL
    compress = compressor(scheme)
    if compress is None:
        return {}
    large = {
        name: pair
        for name, pair in found.items()
        if pair[1].ndim > 1 and pair[1].numel() >= LEAST and pair[1].is_floating_point()
    }
    return {name: shift.to("cpu") for name, shift in compress(large).items()}


def trained_weights(model: Perturbed) -> dict[str, tuple[Tensor, Tensor]]:
    """Return source and adapted value of each trained weight, by its name in a domain file."""
    out = {}
    for held in model.trained:
        inside, away = held.tensors(), held.away
        source, adapted = (away, inside) if model.key.enabled else (inside, away)
        for name, tensor in adapted.items():
            origin = source[name]
            if tensor is not None and origin is not None:
                out[f"{held.name}.{name}" if held.name else name] = origin.to(tensor.device), tensor
    return out
