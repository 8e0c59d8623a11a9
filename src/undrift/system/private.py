"""Private names of PyTorch that undrift needs, each with its reason and what happens in a PyTorch without it.

No other module may use one; `tests/test_private.py` checks. Checked on PyTorch 2.13. (Attributes of modules
and tensors that have had their names since 1.x stand where they are used: `_parameters`, `_buffers`, `_modules`,
`_forward_hooks`.)
"""

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.instancenorm import _InstanceNorm

from undrift._errors import UndriftError

F = TypeVar("F", bound=Callable[..., Any])

# Base classes of layers. The public classes are one for each number of dimensions, lazy and quantised.
ConvNd, ConvTransposeNd, BatchNorm, InstanceNorm = _ConvNd, _ConvTransposeNd, _BatchNorm, _InstanceNorm


def _name(dotted: str, otherwise: Any) -> Any:
    """Return torch's object of this name, or `otherwise` if there is none."""
    try:
        return reduce(getattr, dotted.split("."), torch)
    except AttributeError:
        return otherwise


# Autograd: which pass is under way ---------------------------------------------------------------------------------


def _unknown_pass() -> int:
    raise UndriftError(
        f"PyTorch {torch.__version__} does not say whether a backward pass is under way; needed: a version that does, "
        "as activation checkpointing would draw other noise in its second run. Install PyTorch 2.13."
    )


graph_task: Callable[[], int] = _name("_C._current_graph_task_id", _unknown_pass)
"""Return the number of the backward pass under way, −1 where there is none. Each layer asks, so it is not wrapped."""

saving_hooks: Callable[[bool], Any] = _name("_C._autograd._top_saved_tensors_default_hooks", lambda _: ())
"""Return the hooks that see what autograd saves here, None without: an activation checkpoint has some.

Before PyTorch 2.8 nobody tells: there may always be some, and each layer draws a ticket.
"""

next_node_number: Callable[[], int] = _name("_C._autograd._get_sequence_nr", itertools.count().__next__)
"""Return the number that autograd gives its next node: it orders forward passes."""

_running_node: Callable[[], Any] = _name("_C._current_autograd_node", lambda: None)


def in_backward() -> bool:
    """Return whether autograd is in a backward pass: what runs forward there is a checkpoint's second run."""
    return graph_task() != -1


def running_node_number() -> int | None:
    """Return the number of the autograd node that is running; None if unknown, which means the latest pass."""
    number = getattr(_running_node(), "_sequence_nr", None)
    return None if number is None else int(number())


# Modes: who watches operators --------------------------------------------------------------------------------------

dispatch_modes: Callable[[], int] = _name("_C._len_torch_dispatch_stack", lambda: 0)
"""Return how many dispatch modes (FakeTensorMode, a tracer) see every operator. Each layer asks."""

_interpreters: Callable[[], Any] = _name("_C._functorch.peek_interpreter_stack", lambda: None)
_modes_off: Callable[[], Any] = _name("utils._python_dispatch._disable_current_modes", nullcontext)
_fake: type = _name("_subclasses.fake_tensor.FakeTensor", type(None))


def in_function_transform() -> bool:
    """Return whether a transform of torch.func is under way: it can hold no step and no statistics."""
    return _interpreters() is not None


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """Return a context in which tensors have values, whatever modes are on."""
    context: AbstractContextManager[Any] = _modes_off()
    return context


def is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor has a shape and no values."""
    return isinstance(tensor, _fake)


# The compiler ------------------------------------------------------------------------------------------------------

frame_watcher: Callable[[], Any] = _name("_C._dynamo.eval_frame.get_eval_frame_callback", bool)
"""Return what the compiler sees the frames with that run now, None without; where nobody tells, it may see them."""

_global_hooks: Any = _name("nn.modules.module._global_forward_hooks", (None,))


def hidden_from_compiler(function: F) -> F:
    """Return a function that the compiler does not look into; torch.compiler.disable imports all of it at once."""
    hidden: F = _name("_compile._disable_dynamo", torch.compiler.disable)(function)
    return hidden


def guard_module_hooks() -> None:
    """Make the compiler look at hooks before it runs a compiled network again.

    By default it does not: a network compiled before it was perturbed, or a twin of its class, would run on without
    noise. What was compiled under the old rule is forgotten once.
    """
    import torch._dynamo as dynamo

    if getattr(dynamo.config, "skip_nnmodule_hook_guards", False):
        dynamo.config.skip_nnmodule_hook_guards = False
        dynamo.reset()


def recomputes_more() -> bool:
    """Return whether the compiler was told to compute more again in the backward pass than it does by itself."""
    told: Any = _name("_functorch.config", None)
    return bool(getattr(told, "aggressive_recomputation", False)) or getattr(told, "activation_memory_budget", 1) < 1


def exporting() -> bool:
    """Return whether torch.export is at work: torch.compiler.is_exporting says so of any trace in some versions."""
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))


def hooked_globally() -> bool:
    """Return whether hooks on all modules may have changed a layer's output."""
    return bool(_global_hooks)


# Others ------------------------------------------------------------------------------------------------------------


def copy_all(to: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy tensors of one dtype to others in one launch."""
    together = _name("_foreach_copy_", None)
    if together is not None:
        together(list(to), list(values))
    else:
        for mine, value in zip(to, values, strict=True):
            mine.copy_(value)


def exp_all(values: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the exponential of each tensor, in one launch."""
    together: Callable[[list[Tensor]], Sequence[Tensor]] | None = _name("_foreach_exp", None)
    return together(list(values)) if together is not None else [v.exp() for v in values]


def write_count(tensor: Tensor | None) -> int:
    """Return how often a tensor was written to; 0 for inference tensors, which do not count it."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def forget_workers(loader_iterator: object) -> None:
    """Tell PyTorch that a loader's workers may end: else their end is an error in whatever runs then."""
    _name("_C._remove_worker_pids", lambda _: None)(id(loader_iterator))
