"""The functions that layers call, and `choose`, which picks the implementation for their tensors.

Triton's kernels serve CUDA, small pieces a CPU, PyTorch's own operators all else. A graph that is being compiled is
given operators: for CUDA those that the compiler looks into (`traced`), else opaque ones (`operators`).
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from undrift._errors import OptionError, UndriftWarning
from undrift.kernels import cpu, reference
from undrift.kernels.keys import keys_of
from undrift.kernels.triton.trial import ABSENT, INSTALLED, INTERPRETED, refusal
from undrift.system.private import dispatch_modes, exporting

Path = Literal["plain", "operator", "traced", "cpu", "triton"]
ENVIRONMENT = "UNDRIFT_NOISE"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_REAL = (*FLOATS, torch.float64)
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_SMALL = 1 << 13  # below, a handful of PyTorch calls is quicker than a loop over pieces
# torch.library.triton_op came with PyTorch 2.6; where it is missing the opaque operators do.
_TRACES = hasattr(torch.library, "triton_op")
_forced: list[str] = [os.environ.get(ENVIRONMENT, "")]
_said: set[str] = set()


# What layers call ---------------------------------------------------------------------------------------------------


def square_sum(x: Tensor, groups: int, last: bool, whole: bool = True) -> Tensor:
    """Return Σ x² over each group's channels, in float32 or better: batch × groups × positions (linear: …, 1).

    Where it need not be `whole`, a linear layer's may come in parts (…, parts), for `add_noise` to add up.
    """
    path = choose(x)
    how = _implementation(path)
    in_parts = path == "traced" and last and not whole and how.in_parts(x)
    total: Tensor = how.square_parts(x) if in_parts else how.square_sum(x, groups, last)
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
    out: Tensor = _implementation(path).add_noise(y, plane, log_var, key, first_row, groups, last, *hints)
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
) -> Tensor | None:
    """Return y with a layer's noise by a single autograd node; None where its steps have to be called one by one.

    The energy Σx² + extra, its sum over each output's window, and the noise: few kernels on CUDA, uncompiled.

    Args:
        pool: window, stride and padding of the box filter; () where a window is one input.
        extra: a constant energy at each position.
    """
    if not _on_kernels(y) or choose(y, x, log_var) != "triton":
        return None
    from undrift.kernels.triton import layer

    if not layer.fits(x, y, log_var):
        return None
    return layer.add_noise(x, y, log_var, key, layer.Geometry(groups, last, pool, extra), first_row)


def keys(seed: Tensor, step: Tensor, count: int) -> Tensor:
    """Return the first keys of a step."""
    if not count or not _on_kernels(step) or choose(step, seed, dtypes=(torch.int64,)) != "triton":
        return keys_of(seed, step, count)
    from undrift.kernels.triton import launch

    return launch.keys(seed, step, count)  # one launch for sixteen


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


# The choice ----------------------------------------------------------------------------------------------------------


@contextmanager
def force(path: Path) -> Iterator[None]:
    """Use one implementation for the length of a `with` block, wherever it can run; also by UNDRIFT_NOISE=plain."""
    if path not in get_args(Path):
        raise OptionError(f"there is no implementation {path!r} of the noise. Choose one of {get_args(Path)}.")
    _forced.append(path)
    try:
        yield
    finally:
        _forced.pop()


def choose(*tensors: Tensor, dtypes: tuple[torch.dtype, ...] = FLOATS) -> Path:
    """Return the implementation for these tensors; the first is the large one, and `dtypes` what kernels take."""
    forced, large = _forced[-1], tensors[0]
    if forced == "plain":
        return "plain"
    if torch.compiler.is_compiling():
        return "operator" if forced == "operator" else _compiled(large, dtypes)
    # FakeTensor, tracers: they must see one operator, not what it does to memory.
    if forced == "operator" or dispatch_modes():
        return "operator"
    for tensor in tensors:
        if type(tensor) not in _PLAIN_TYPES:
            return "operator"
    if _on_kernels(large):
        return on_cuda(large, dtypes)
    return "cpu" if in_pieces(*tensors) else "plain"


def _on_kernels(tensor: Tensor) -> bool:
    """Return whether Triton's kernels are for this tensor: on CUDA, or by force in Triton's interpreter."""
    return tensor.is_cuda or (_forced[-1] == "triton" and INTERPRETED)


def _implementation(path: Path) -> Any:
    """Return the module whose `square_sum` and `add_noise` are to be called, imported where a machine needs it."""
    if path == "plain":
        return reference
    if path == "cpu":
        return cpu
    if path == "operator":
        from undrift.kernels import operators

        return operators
    if path == "traced":
        from undrift.kernels.triton import traced

        return traced
    from undrift.kernels.triton import eager

    return eager


def in_pieces(*tensors: Tensor) -> bool:
    """Return whether these tensors (the first is the large one) are worth the loop over pieces of `cpu`."""
    large = tensors[0].numel() >= _SMALL or _forced[-1] == "cpu"
    return large and all(t.device.type == "cpu" and t.dtype in _REAL for t in tensors)


def _compiled(large: Tensor, dtypes: tuple[torch.dtype, ...]) -> Path:
    # An exported graph keeps its operators, for whatever device it will run on. They say why, where they draw slowly.
    if not large.is_cuda or large.dtype not in dtypes or not has_triton() or not _TRACES or exporting():
        return "operator"
    return "traced"  # the compiler's own kernels are Triton's too: one that cannot run ends there


def on_cuda(large: Tensor, dtypes: tuple[torch.dtype, ...] = FLOATS) -> Path:
    """Return "triton" where its kernels can serve this tensor, else "plain", saying why once."""
    if not has_triton():
        return _instead("no-triton", ABSENT, "Install it")
    if large.dtype not in dtypes:
        why = f"its kernels are for float32, bfloat16 and float16, and this is {large.dtype}"
        return _instead(str(large.dtype), why, "Take one of those")
    why = refusal(large.get_device())
    return _instead(why, why, "Mend that") if why else "triton"


def has_triton() -> bool:
    """Return whether Triton is installed; it is imported by the first call of a kernel."""
    return INSTALLED


def _instead(reason: str, why: str, cure: str) -> Path:
    if reason not in _said:
        _said.add(reason)
        warnings.warn(
            f"noise on CUDA is drawn with PyTorch's own operators, several times slower than by one kernel: {why}. "
            f"Results are the same. {cure}, or set {ENVIRONMENT}=plain to hear no more of it (and compile the network: "
            "that fuses them).",
            UndriftWarning,
            stacklevel=2,
        )
    return "plain"
