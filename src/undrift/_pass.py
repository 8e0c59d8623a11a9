"""A forward pass under way in which nothing has to be looked up: the key of each weight's first use is ready."""

import torch
from torch import Tensor

from undrift.replay import in_backward, unhooked


class Pass:
    """What a network's layers ask for in a pass, as it was when the pass began.

    Args:
        keys: each of the step's keys: 2k is weight k's.
        calls: how often each weight was used; shared with the network's `Key`.
        rank: this process's.
    """

    __slots__ = ("calls", "device", "graded", "keys", "rank")

    def __init__(self, keys: tuple[Tensor, ...], calls: dict[int, int], rank: int) -> None:
        self.keys, self.calls, self.rank = keys, calls, rank
        self.device = keys[0].get_device() if keys else -1
        self.graded = torch.is_grad_enabled()

    def goes_on(self) -> bool:
        """Return whether a layer that asks now is in the pass itself: it runs for the first time, and once.

        A checkpoint inside a pass turns gradients off, or hooks itself to what autograd saves; and a pass that raised
        has left its keys to a backward pass.
        """
        graded = self.graded
        return torch.is_grad_enabled() is graded and not in_backward() and (not graded or unhooked())
