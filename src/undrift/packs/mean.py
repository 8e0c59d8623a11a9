"""Compress the mean of a domain: the shifts of all weights that were trained, by the name of a scheme.

benchmarks/compression.py compares them: docs/explanation/packs.md.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from undrift._errors import OptionError
from undrift.options import _suggest
from undrift.packs.low_rank import LowRankShift
from undrift.packs.shift import Shift
from undrift.packs.stepped import SteppedShift
from undrift.posterior.perturbed import Perturbed

EXACT = "exact"
DEFAULT = "auto"
LARGE, SMALL = "ternary", "4-bit"
"""What "auto" takes: three levels are too few for a narrow network, whose file is small anyway."""
ENOUGH = 1_000_000
"""Trained weights from which on a network is large."""

STEPPED: Mapping[str, Callable[[Tensor], Shift]] = {
    "signs": partial(SteppedShift.of, levels=2),
    "ternary": partial(SteppedShift.of, levels=3, dead_zone=0.6),
    "2-bit": partial(SteppedShift.of, levels=4),
    "3-bit": partial(SteppedShift.of, levels=7),
    "4-bit": partial(SteppedShift.of, levels=15),
}
RANK = "rank-"

LEAST = 4096
"""Smaller weights stay exact: they are many in name only, and a first layer with its few weights counts most."""


def compressor(scheme: str) -> Callable[[Tensor], Shift] | None:
    """Return what compresses a shift by this scheme, or None for "exact"; raise where there is no such scheme."""
    rank = scheme.removeprefix(RANK) if isinstance(scheme, str) and scheme.startswith(RANK) else ""
    if rank.isdecimal() and int(rank) > 0:
        return partial(LowRankShift.of, rank=int(rank))
    if scheme == EXACT:
        return None
    if scheme == DEFAULT:
        return STEPPED[LARGE]
    if scheme not in STEPPED:
        known = (DEFAULT, EXACT, *STEPPED, RANK + "8")
        raise OptionError(
            f"mean={scheme!r}{_suggest(str(scheme), known)} is no way to store trained weights; needed: one of "
            f"{', '.join(known)} (any rank). Take {EXACT} to keep them bit for bit, or leave it out."
        )
    return STEPPED[scheme]


@torch.no_grad()
def mean_shifts(model: Perturbed, scheme: str) -> dict[str, Shift]:
    """Return the compressed shifts of a network's trained weights by name; what is small or a vector has none."""
    found = trained_weights(model)
    if scheme == DEFAULT:
        scheme = LARGE if sum(adapted.numel() for _, adapted in found.values()) >= ENOUGH else SMALL
    compress = compressor(scheme)
    if compress is None:
        return {}
    return {
        name: compress(adapted.detach().double() - source.detach().double()).to("cpu")
        for name, (source, adapted) in found.items()
        if adapted.ndim > 1 and adapted.numel() >= LEAST and adapted.is_floating_point()
    }


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
