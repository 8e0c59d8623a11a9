"""Keep autocast's cache consistent with weights that change in place."""

import torch


def weights_moved() -> None:
    """Drop autocast's copies of the weights, which it otherwise keeps to the end of its block.

    Without this a stream inside one long autocast block would answer with its first weights for ever.
    """
    torch.clear_autocast_cache()
