"""How a cell runs fast: bfloat16, and convolutions that choose their algorithms by trial, for one batch size only."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def quickly(device: torch.device, fast: bool) -> Iterator[None]:
    """Let convolutions run in bfloat16 where that was asked for; `trial` says for which batches they try algorithms."""
    tried = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        with torch.autocast(device.type, torch.bfloat16, enabled=fast):
            yield
    finally:
        torch.backends.cudnn.benchmark = tried


def trial(fast: bool, images: int, usual: int | None) -> None:
    """Let convolutions try algorithms for the next batch if it is of the usual size, and guess for any other.

    Each new shape is tried anew, convolution by convolution: that can pay for a size that comes a thousand times,
    hardly for a domain's short last batch or a few batches that are only scored.
    """
    if fast:
        torch.backends.cudnn.benchmark = images == usual
