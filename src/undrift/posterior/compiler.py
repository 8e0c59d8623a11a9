"""Configure torch.compile for perturbed networks."""

import torch

from undrift.posterior.seeds import count_traced
from undrift.system.private import guard_module_hooks


def prepare_compiler() -> None:
    """Make compiled networks look at hooks, and let `Key` count the uses of a weight while a graph is traced.

    This imports the compiler, which takes a second: the first call of a perturbed network and every optimiser import it
    as well.
    """
    torch.compiler.assume_constant_result(count_traced)
    guard_module_hooks()
