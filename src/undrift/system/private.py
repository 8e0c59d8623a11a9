"""Private names of PyTorch that undrift needs: each in one function, with its reason and what happens without it.

Nothing else in the package may use one; `tests/test_private.py` looks. Checked on PyTorch 2.13. Where a name is missing
(2.6 lacks some), the answer is the careful one: slower, never wrong.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.module import _global_forward_hooks
from torch.utils._python_dispatch import _disable_current_modes

F = TypeVar("F", bound=Callable[..., Any])

# Base classes of layers. The public classes are one for each number of dimensions, lazy and quantised.
ConvNd, ConvTransposeNd, BatchNorm, InstanceNorm = _ConvNd, _ConvTransposeNd, _BatchNorm, _InstanceNorm


# Autograd: which pass is under way ---------------------------------------------------------------------------------


graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""Return the number of the backward pass under way, −1 where there is none. Each layer asks, so it is not wrapped."""


def in_backward() -> bool:
    """Return whether autograd is in a backward pass: what runs forward there is a checkpoint's second run."""
    return graph_task() != -1


def next_node_number() -> int:
    """Return the number that autograd gives its next node: it orders forward passes."""
    return int(torch._C._autograd._get_sequence_nr())


def running_node_number() -> int | None:
    """Return the number of the node whose gradient is computed now, None outside of a node."""
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


saving_hooks: Callable[[bool], Any] = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: ())
"""Return the hooks that see what autograd saves here, None without: an activation checkpoint has some.

Before PyTorch 2.8 nobody tells, so that there may be some always.
"""


# Modes: who watches operators ----------------------------------------------------------------------------------------


def in_function_transform() -> bool:
    """Return whether a transform of torch.func is under way: it can hold no step and no statistics."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def under_dispatch_mode() -> bool:
    """Return whether a dispatch mode (FakeTensorMode, a tracer) sees every operator."""
    return torch._C._len_torch_dispatch_stack() > 0


def without_dispatch_modes() -> AbstractContextManager[None]:
    """Return a context in which tensors have values, whatever modes are on."""
    context: AbstractContextManager[None] = _disable_current_modes()
    return context


def is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor has a shape and no values."""
    return isinstance(tensor, FakeTensor)


# The compiler --------------------------------------------------------------------------------------------------------


def hidden_from_compiler(function: F) -> F:
    """Return a function that the compiler does not look into; torch.compiler.disable imports all of it at once."""
    return _disable_dynamo(function)  # type: ignore[return-value]


frame_watcher: Callable[[], Any] = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", bool)
"""Return what the compiler sees the frames with that run now, None without; where nobody tells, it may see them."""


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
    told: Any = torch._functorch.config
    return bool(getattr(told, "aggressive_recomputation", False)) or getattr(told, "activation_memory_budget", 1) < 1


def exporting() -> bool:
    """Return whether torch.export is at work: torch.compiler.is_exporting says so of any trace in some versions."""
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))


def hooked_globally() -> bool:
    """Return whether hooks on all modules may have changed a layer's output."""
    return bool(_global_forward_hooks)


# Others --------------------------------------------------------------------------------------------------------------


def copy_all(to: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy tensors of one dtype to others in one launch."""
    if hasattr(torch, "_foreach_copy_"):
        torch._foreach_copy_(list(to), list(values))
    else:
        for mine, value in zip(to, values, strict=True):
            mine.copy_(value)


def exp_all(values: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the exponential of each tensor, in one launch."""
    return torch._foreach_exp(list(values)) if hasattr(torch, "_foreach_exp") else [v.exp() for v in values]


def forget_workers(loader_iterator: object) -> None:
    """Tell PyTorch that a loader's workers may end: else their end is an error in whatever runs then."""
    remove = getattr(torch._C, "_remove_worker_pids", None)
    if remove is not None:
        remove(id(loader_iterator))
