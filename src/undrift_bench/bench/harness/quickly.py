"""Run a cell fast: bfloat16, and convolution algorithms chosen by trial for full batches."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def quickly(device: torch.device, fast: bool) -> Iterator[None]:
    """Let convolutions run in bfloat16 where that was asked for; `trial` says for which passes they try algorithms."""
    tried = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        with torch.autocast(device.type, torch.bfloat16, enabled=fast):
            yield
    finally:
        torch.backends.cudnn.benchmark = tried


def trial(fast: bool, images: int, usual: int | None) -> None:
    """Let convolutions try algorithms for a pass over whole batches of the usual size, and guess for any other.

    Each new shape is a new trial for every convolution. That pays for a size that comes a thousand times, but hardly
    for a short last batch or a few batches that are only scored. Ten draws in one pass count as ten batches.
    """
    if fast:
        torch.backends.cudnn.benchmark = usual is not None and images % usual == 0


def by_pass(net: nn.Module, usual: int) -> None:
    """Let a network's convolutions try algorithms by what each of its passes sees, forwards and backwards.

    A step may have passes over parts of its batch, of a new size each time (ROID's). Those come last and their
    gradients first, so the gradients of the whole batch must set the choice again: the first algorithm of a shape,
    tried or guessed, is kept for the life of the process.
    """

    def forwards(_net: nn.Module, args: tuple[Any, ...]) -> None:
        trial(True, len(args[0]), usual)

    def backwards(_net: nn.Module, _args: tuple[Any, ...], output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda grad: trial(True, len(grad), usual))

    net.register_forward_pre_hook(forwards)
    net.register_forward_hook(backwards)
