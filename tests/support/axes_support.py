"""A small plain network, its state and shifted batches that the tests of the methods' axes share."""

import torch
from torch import Tensor, nn

from support import images


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 6),
        nn.Linear(6, 4),
    )


def state(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in net.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    return [name for name in one if torch.equal(one[name], other[name])]


def batches(count: int = 3) -> list[Tensor]:
    return [images(8) + 0.1 * number for number in range(count)]
