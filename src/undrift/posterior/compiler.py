"""What torch.compile has to be told about perturbed networks, told when it is first imported.

Importing it takes a second, which a user who never compiles should not wait for.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"


def guard_hooks() -> None:
    """Make torch.compile look at hooks before it runs a compiled network again; now, or once it is imported.

    By default it does not: a network compiled before it was perturbed, or a twin of its class, would run on without
    noise. What was compiled under the old rule is forgotten once.
    """
    if _COMPILER in sys.modules:
        dynamo: Any = sys.modules[_COMPILER]
        if _tell(dynamo):
            dynamo.reset()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _tell(dynamo: Any) -> bool:
    """Set what is needed; return whether something may have been compiled under the old rule."""
    from undrift.posterior.seeds import count_traced

    dynamo.assume_constant_result(count_traced)
    before: bool = dynamo.config.skip_nnmodule_hook_guards
    dynamo.config.skip_nnmodule_hook_guards = False
    return before


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the compiler as Python would, once, and has it told after its import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _COMPILER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Telling(spec.loader)
        return spec


class _Telling(importlib.abc.Loader):
    """Another loader, after which the compiler is told."""

    def __init__(self, inner: importlib.abc.Loader) -> None:
        self.inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.inner.exec_module(module)
        _tell(module)  # nothing was compiled yet, and resetting a module half imported would fail

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)  # get_source and others, for tracebacks and inspect
