"""Pick the implementation of the noise for the tensors at hand.

CUDA uses Triton's kernels, a CPU small pieces, and all else PyTorch's own operators. A graph that is being compiled
gets custom operators: for CUDA those that the compiler can inline (`traced`), else opaque ones (`operators`).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch
from torch import Tensor

from undrift._errors import OptionError
from undrift.kernels.layout import FLOATS
from undrift.kernels.triton.trial import ABSENT, INSTALLED, INTERPRETED, refusal
from undrift.system.private import dispatch_modes, exporting
from undrift.system.warning import warn

Path = Literal["plain", "operator", "traced", "cpu", "triton"]
ENVIRONMENT = "UNDRIFT_NOISE"
_REAL = (*FLOATS, torch.float64)
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_SMALL = 1 << 13  # below, a handful of PyTorch calls is quicker than a loop over pieces
# torch.library.triton_op came with PyTorch 2.6; where it is missing the opaque operators do.
_TRACES = hasattr(torch.library, "triton_op")
_forced: list[str] = [os.environ.get(ENVIRONMENT, "")]
_said: set[str] = set()


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
    if on_kernels(large):
        return on_cuda(large, dtypes)
    return "cpu" if in_pieces(*tensors) else "plain"


def on_kernels(tensor: Tensor) -> bool:
    """Return whether Triton's kernels are for this tensor: on CUDA, or by force in Triton's interpreter."""
    return tensor.is_cuda or (_forced[-1] == "triton" and INTERPRETED)


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
        warn(
            f"noise on CUDA is drawn with PyTorch's own operators, several times slower than by one kernel: {why}. "
            f"Results are the same. {cure}, or set {ENVIRONMENT}=plain to hear no more of it (and compile the network: "
            "that fuses them)."
        )
    return "plain"
