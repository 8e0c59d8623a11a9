"""A residual network in miniature, for methods over epochs."""

import torch
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.downsample = nn.Sequential(nn.Conv2d(4, 6, 1), nn.BatchNorm2d(6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.bn1(self.conv1(x)) + self.downsample(x))


class Net(nn.Module):
    """A residual network in miniature, with SHOT's bottleneck."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), Block(), nn.Flatten())
        self.bottleneck = nn.Sequential(nn.Linear(54, 8), nn.BatchNorm1d(8))
        self.classifier = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.bottleneck(self.backbone(x)))
        return logits


def network() -> nn.Module:
    torch.manual_seed(4)
    return Net().eval()
