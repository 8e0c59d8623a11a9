"""Adapt at test time in a loop of Accelerate; each process follows its own share of the images.

pip install undrift accelerate
accelerate launch your_script.py
"""

from collections.abc import Iterable, Iterator
from itertools import tee

import torch
from accelerate import Accelerator

import undrift


def answers(
    accelerator: Accelerator, net: torch.nn.Module, loader: Iterable, **settings
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the adapted network's answers and the labels, of all processes together."""
    net, loader = accelerator.prepare(net, loader)
    batches, labelled = tee(loader)  # the stream reads no labels
    stream = undrift.stream(accelerator.unwrap_model(net), batches, **settings)
    for p, (_, labels) in zip(stream, labelled, strict=True):
        yield accelerator.gather_for_metrics((p.label, labels))
    stream.remove()  # the source network again, bit for bit


def accuracy(accelerator: Accelerator, net: torch.nn.Module, loader: Iterable, **settings) -> float:
    """Return the share of right answers along the stream."""
    found, labels = map(torch.cat, zip(*answers(accelerator, net, loader, **settings), strict=True))
    return float((found == labels).float().mean())
