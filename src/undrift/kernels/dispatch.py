"""The functions that layers call: each calls the implementation that `choice.choose` picks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from undrift.kernels import cpu, reference
from undrift.kernels.choice import Path, choose, on_kernels
from undrift.kernels.epsilon import keys_of
from undrift.kernels.reference import box_filter, without_autocast
from undrift.kernels.triton import layer


def square_sum(x: Tensor, groups: int, last: bool) -> Tensor:
    """Return Σ x² over each group's channels, in float32 or better: batch × groups × positions (linear: …, 1)."""
    path = choose(x)
    total: Tensor = (_AT_HAND.get(path) or _imported(path)).square_sum(x, groups, last)
    return total


def add_noise(
    y: Tensor,
    plane: Tensor,
    log_var: Tensor,
    key: Tensor,
    first_row: int,
    groups: int,
    last: bool,
    handle: Tensor | None = None,
    by_rows: bool = False,
) -> Tensor:
    """Return y + σ·√plane·ε, with σ² = exp(log_var) of each channel and √plane of its group, in y's dtype.

    Args:
        handle: what `share` gave for this layer, in a compiled graph: log_var's gradient goes to it.
        by_rows: what makes x reads the plane's gradient once for all channels (a hint for compiled graphs).
    """
    path = choose(y, plane, log_var)
    hints = (handle, by_rows) if path == "traced" else ()
    how = _AT_HAND.get(path) or _imported(path)
    out: Tensor = how.add_noise(y, plane, log_var, key, first_row, groups, last, *hints)
    return out


def add_layer_noise(
    x: Tensor,
    y: Tensor,
    log_var: Tensor,
    key: Tensor,
    first_row: int,
    groups: int,
    last: bool,
    pool: tuple[tuple[int, ...], ...],
    extra: float,
    frozen: Callable[[], Tensor | None] = lambda: None,
    handle: Tensor | None = None,
    by_rows: bool = False,
) -> Tensor:
    """Return y with a layer's noise: the energy Σx² + extra, its sum over each output's window, and `add_noise`.

    All in one autograd node with few kernels on CUDA, uncompiled. In a compiled graph, the energy of a linear layer
    may come in parts (…, parts), which `add_noise` adds up.

    Args:
        pool: window, stride and padding of the box filter; () where a window is one input.
        extra: a constant energy at each position.
        frozen: gives the layer's weight if y is just x's product with it (and a frozen bias) and both are frozen.
        handle, by_rows: as in `add_noise`.
    """
    path = choose(y, x, log_var)
    if path == "triton" and layer.fits(x, y, log_var):
        return layer.add_noise(x, y, log_var, key, layer.Geometry(groups, last, pool, extra), first_row, frozen())
    how, traced = _AT_HAND.get(path) or _imported(path), path == "traced"
    with without_autocast(x.device):
        in_parts = traced and last and not extra and how.in_parts(x)
        energy = how.square_parts(x) if in_parts else how.square_sum(x, groups, last)
        plane = box_filter(energy + extra if extra else energy, pool)
        hints = (handle, by_rows) if traced else ()
        out: Tensor = how.add_noise(y, plane, log_var, key, first_row, groups, last, *hints)
        return out


def keys(seed: Tensor, step: Tensor, count: int) -> Tensor:
    """Return the first keys of a step: one launch on a GPU instead of sixteen."""
    if not count or not on_kernels(step) or choose(step, seed, dtypes=(torch.int64,)) != "triton":
        return keys_of(seed, step, count)
    from undrift.kernels.triton import launch

    return launch.keys(seed, step, count)


def share(log_vars: list[Tensor], groups: list[int], last: list[bool]) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """Return log-variances as one row, for the KL, and a handle for the noise of each; None where nothing is gained.

    Args:
        log_vars: vectors of one dtype and device.
        groups: of each layer's channels.
        last: whether channels are neighbours in each layer's output.
    """
    if choose(log_vars[0]) != "traced":
        return None
    from undrift.kernels.triton import shared

    row, *handles = shared.spread(log_vars, groups, last)
    return row, tuple(handles)


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return x in a lower precision, for a product and its energy, where a compiled graph gains by that; else None."""
    # Not float16: an energy's gradient may be larger than all of its numbers.
    if not torch.compiler.is_compiling() or x.dtype != torch.float32 or dtype != torch.bfloat16:
        return None
    if choose(x) != "traced":
        return None
    from undrift.kernels.triton import traced

    return traced.narrowed(x, dtype)


# The modules whose `square_sum` and `add_noise` are called; others are imported when a machine needs them.
_AT_HAND: dict[str, Any] = {"plain": reference, "cpu": cpu}


def _imported(path: Path) -> Any:
    if path == "operator":
        from undrift.kernels import operators

        return operators
    if path == "traced":
        from undrift.kernels.triton import traced

        return traced
    from undrift.kernels.triton import eager

    return eager
