"""Tell autocast that weights have moved."""

import torch


def weights_moved() -> None:
    """Say that weights have changed in place, to autocast: it keeps its casts of them to the end of its block.

    A stream inside one long block would answer with its first weights for ever.
    """
    torch.clear_autocast_cache()
