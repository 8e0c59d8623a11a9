"""Which implementation runs: Triton's kernels on CUDA, small pieces on a CPU, PyTorch's own operators elsewhere.

A graph that is being compiled is given operators: for CUDA those that the compiler looks into (`traced`), else opaque
ones (`operators`). `force` chooses by hand.
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
from undrift.kernels.triton.trial import ABSENT, INSTALLED, refusal

Path = Literal["plain", "operator", "traced", "cpu", "triton"]
ENVIRONMENT = "UNDRIFT_NOISE"
_SMALL = 1 << 13  # below, a handful of PyTorch calls is quicker than a loop over pieces
_forced: list[str] = [os.environ.get(ENVIRONMENT, "")]
_said: set[str] = set()


@contextmanager
def force(path: Path) -> Iterator[None]:
    """Use one implementation for the length of a `with` block, wherever it can run; also by UNDRIFT_NOISE=reference."""
    if path not in get_args(Path):
        raise OptionError(f"there is no implementation {path!r} of the noise. Choose one of {get_args(Path)}.")
    _forced.append(path)
    try:
        yield
    finally:
        _forced.pop()


def choose(*tensors: Tensor) -> Path:
    """Return the implementation for these tensors (the first is the large one)."""
    forced = _forced[-1]
    if torch.compiler.is_compiling():
        return "plain" if forced == "plain" else "operator" if forced == "operator" else _compiled(tensors[0])
    if forced in {"plain", "operator"}:
        return "plain" if forced == "plain" else "operator"
    if torch._C._len_torch_dispatch_stack() > 0 or any(type(t) not in _PLAIN_TYPES for t in tensors):
        return "operator"  # FakeTensor, tracers: they must see one operator, not what it does to memory
    large = tensors[0]
    if large.is_cuda:
        return _on_cuda(large)
    return "cpu" if in_pieces(*tensors) else "plain"


def in_pieces(*tensors: Tensor) -> bool:
    """Return whether these tensors (the first is the large one) are worth the loop over pieces of `cpu`."""
    return cpu.supports(*tensors) and (tensors[0].numel() >= _SMALL or _forced[-1] == "cpu")


_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def _compiled(large: Tensor) -> Path:
    # An exported graph keeps its operators, for whatever device it will run on. They say why, where they draw slowly.
    if not large.is_cuda or large.dtype not in _DTYPES or not has_triton() or not _TRACES or _exporting():
        return "operator"
    return "traced"  # the compiler's own kernels are Triton's too: one that cannot run ends there


def _exporting() -> bool:
    # Not torch.compiler.is_exporting: under the compiler of some versions (2.11) it says yes to whatever is traced.
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))


# torch.library.triton_op came with PyTorch 2.6; where it is missing the opaque operators do.
_TRACES = hasattr(torch.library, "triton_op")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def quick(x: Tensor, y: Tensor) -> bool:
    """Return whether a layer's noise may be one node of autograd: plain tensors on CUDA, nothing traced or forced."""
    return (
        y.is_cuda
        and type(x) in _PLAIN_TYPES
        and type(y) in _PLAIN_TYPES
        and _forced[-1] in _QUICK
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and not refusal(y.get_device())
    )


_QUICK = ("", "cpu", "triton")


def _on_cuda(large: Tensor) -> Path:
    """Return "triton" where its kernels can serve this tensor, else "plain", saying why once."""
    if not has_triton():
        return _instead("no-triton", ABSENT, "Install it")
    if large.dtype not in _DTYPES:
        why = f"its kernels are for float32, bfloat16 and float16, and this is {large.dtype}"
        return _instead(str(large.dtype), why, "Take one of those")
    why = refusal(large.get_device())
    return _instead(why, why, "Mend that") if why else "triton"


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


def has_triton() -> bool:
    """Return whether Triton is installed; it is imported by the first call of a kernel."""
    return INSTALLED


def square_sum(x: Tensor, groups: int, last: bool, whole: bool = True) -> Tensor:
    """Return Σ x² over each group's channels, in float32 or better: batch × groups × positions (linear: …, 1).

    Where it need not be `whole`, a linear layer's may come in parts (…, parts), for `add_noise` to add up.
    """
    path = choose(x)
    if path == "plain":
        return reference.square_sum(x, groups, last)
    if path == "traced":
        from undrift.kernels.triton import traced

        parts = last and not whole and traced.in_parts(x)
        return traced.square_parts(x) if parts else traced.square_sum(x, groups, last)
    if path == "operator":
        from undrift.kernels import operators

        return operators.square_sum(x, groups, last)
    return _SquareSum.apply(x, groups, last, path)  # type: ignore[no-untyped-call]


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

    Of a graph's `shared` log-variances, the gradient goes to this one's `handle`. `by_rows`: what makes x reads the
    plane's gradient once for all channels.
    """
    path = choose(y, plane, log_var)
    if path == "plain":
        return reference.add_noise(y, plane, log_var, key, first_row, groups, last)
    if path == "operator":
        from undrift.kernels import operators

        return operators.add_noise(y, plane, log_var, key, first_row, groups, last)
    if path == "traced":
        from undrift.kernels.triton import traced

        return traced.add_noise(y, plane, log_var, key, first_row, groups, last, handle, by_rows)
    return _AddNoise.apply(y, plane, log_var, key, first_row, groups, last, path)  # type: ignore[no-untyped-call]


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


class _SquareSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: int, last: bool, path: Path) -> Tensor:
        ctx.save_for_backward(x)
        ctx.settings, ctx.path = (groups, last), path
        if path == "cpu":
            return reference.square_sum(x, groups, last)
        from undrift.kernels.triton import launch

        return launch.square_sum(x, groups, last)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        if ctx.path == "cpu":  # from x as it is: autograd would keep 2·x, in float32, and read it once more
            return reference.square_sum_gradient(grad, x, *ctx.settings), None, None, None
        from undrift.kernels.triton import launch

        return launch.square_sum_gradient(grad, x, *ctx.settings), None, None, None


class _AddNoise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        y, plane, log_var, key, first_row, groups, last, path = args
        ctx.settings = (first_row, groups, last)
        if path == "cpu":
            out, kept = cpu.add_noise(y, plane, log_var, key, first_row, groups, last)
            ctx.save_for_backward(plane, log_var, kept)
            return out
        from undrift.kernels.triton import launch

        ctx.save_for_backward(plane, log_var, None, key)
        return launch.add_noise(y, plane, log_var, key, first_row, groups, last)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        plane, log_var, kept, *key = ctx.saved_tensors
        first_row, groups, last = ctx.settings
        grads: tuple[Tensor | None, Tensor | None] = (None, None)
        if any(ctx.needs_input_grad[1:3]):
            if key:
                from undrift.kernels.triton import launch

                grads = launch.noise_gradients(grad, plane, log_var, key[0], first_row, groups, last)
            else:
                grads = cpu.noise_gradients(grad, kept, plane, log_var, groups, last)
        return grad, *grads, None, None, None, None, None
