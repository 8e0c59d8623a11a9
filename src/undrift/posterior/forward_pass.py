"""A forward pass under way in which nothing has to be looked up: the key of each weight's first use is ready."""

import torch
from torch import Tensor

from undrift.posterior.log_var_row import Row
from undrift.posterior.replay import _hooks


class Pass:
    """What a network's layers ask for in a pass, as it was when the pass began.

    Args:
        keys: each of the step's keys: 2k is weight k's.
        calls: how often each weight was used; shared with the network's `Key`.
        rank: this process's.
        row: the log-variances as one row, where that is quicker.
    """

    __slots__ = ("__weakref__", "calls", "device", "graded", "keys", "rank", "row")

    def __init__(self, keys: tuple[Tensor, ...], calls: dict[int, int], rank: int, row: Row | None = None) -> None:
        self.keys, self.calls, self.rank, self.row = keys, calls, rank, row
        self.device = keys[0].get_device() if keys else -1
        self.graded = torch.is_grad_enabled()

    def goes_on(self) -> bool:
        """Return whether a layer that asks now is in the pass itself: it runs for the first time, and once.

        A checkpoint inside a pass turns gradients off, or hooks itself to what autograd saves; and a pass that raised
        has left its keys to a backward pass.
        """
        graded = self.graded
        # `in_backward` and `unhooked`, written out: each layer asks.
        if torch.is_grad_enabled() is not graded or torch._C._current_graph_task_id() != -1:
            return False
        return not graded or (_hooks is not None and _hooks(True) is None)
