"""WideResNet for 32×32 images (Zagoruyko & Komodakis 2016), with the parameter names of RobustBench's checkpoints.

Input: raw [0, 1] images, not normalised.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from undrift_bench.zoo.init import he


class PreActivation(nn.Module):
    """Two 3×3 convolutions, each after BatchNorm and ReLU, beside a shortcut.

    Where the width changes, the shortcut is a 1×1 convolution of the *activated* input; elsewhere it is the raw input.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.convShortcut = None if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, before any activation."""
        active = F.relu(self.bn1(x))
        shortcut: Tensor = x if self.convShortcut is None else self.convShortcut(active)
        inner: Tensor = self.conv2(F.relu(self.bn2(self.conv1(active))))
        return shortcut + inner


class Stage(nn.Module):
    """Blocks of one width; the first changes width and stride."""

    def __init__(self, blocks: int, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        first = PreActivation(inputs, outputs, stride)
        self.layer = nn.Sequential(first, *(PreActivation(outputs, outputs, 1) for _ in range(blocks - 1)))

    def forward(self, x: Tensor) -> Tensor:
        """Return the last block's output."""
        out: Tensor = self.layer(x)
        return out


class WideResNet(nn.Module):
    """Three stages of (depth − 4) / 6 blocks, 16, 32 and 64 channels times `widen`."""

    def __init__(self, depth: int, widen: int, classes: int) -> None:
        super().__init__()
        assert (depth - 4) % 6 == 0, f"a WideResNet of depth {depth} does not exist: depth is 6n + 4"
        blocks = (depth - 4) // 6
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.block1 = Stage(blocks, 16, 16 * widen, 1)
        self.block2 = Stage(blocks, 16 * widen, 32 * widen, 2)
        self.block3 = Stage(blocks, 32 * widen, 64 * widen, 2)
        self.bn1 = nn.BatchNorm2d(64 * widen)
        self.fc = nn.Linear(64 * widen, classes)
        he(self)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of images N×3×H×W."""
        features = F.relu(self.bn1(self.block3(self.block2(self.block1(self.conv1(x))))))
        logits: Tensor = self.fc(features.mean((2, 3)))
        return logits


def wrn28_10(classes: int = 10) -> WideResNet:
    """Return a WideResNet-28-10 with fresh weights: 36.5 M parameters, CIFAR-10-C's usual source model."""
    return WideResNet(28, 10, classes)


def wrn40_2(classes: int = 10) -> WideResNet:
    """Return a WideResNet-40-2 with fresh weights: 2.2 M parameters, small enough for two cores."""
    return WideResNet(40, 2, classes)
