"""A small network and second heads for the methods that need something from source training."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from undrift.likelihood.second_head import rotation_head

UNTRAINED = "untrained"


class Small(nn.Module):
    """A shared part of two modules, and a classifier behind functional operations."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.layer2 = nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.norm2 = nn.GroupNorm(2, 8)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        return self.fc(F.relu(self.norm2(self.layer2(x))).mean((2, 3)))

    def shared(self, x: Tensor) -> Tensor:
        return self.layer2(F.relu(self.norm1(self.conv1(x))))


SHARED = ("conv1", "norm1", "layer2")


def small(seed: int = 0) -> Small:
    torch.manual_seed(seed)
    return Small().eval()


def trained_head(net: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    return rotation_head(net)


class Fixed(nn.Module):
    """A head that says the same of every view."""

    def __init__(self, *logits: float) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits))

    def forward(self, features: Tensor) -> Tensor:
        return self.logits + 0 * features.flatten(1).sum(1, keepdim=True)
