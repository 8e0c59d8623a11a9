"""Compress the shifts of all trained weights by a named scheme.

benchmarks/compression.py compares the schemes: docs/explanation/packs.md.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from undrift._errors import OptionError
from undrift.options import _suggest
from undrift.packs.bit_rate import Pairs, at_rate, each
from undrift.packs.low_rank import LowRankShift
from undrift.packs.quantized import QuantizedShift
from undrift.packs.shift import Shift
from undrift.posterior.perturbed import Perturbed

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
