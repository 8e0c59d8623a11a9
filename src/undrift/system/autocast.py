"""Leave autocast, and keep its cache consistent with weights that change in place."""

from contextlib import AbstractContextManager, nullcontext

import torch


def weights_moved() -> None:
    """Drop autocast's copies of the weights, which it otherwise keeps to the end of its block.

    Without this a stream inside one long autocast block would answer with its first weights for ever.
    """
    torch.clear_autocast_cache()


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Return a context without autocast; most of the time there is none to leave, and entering takes its time."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
