"""ResNet-26 for 32×32 images with GroupNorm, as test-time training (Sun et al. 2020) uses it.

Input: raw [0, 1] images, not normalised.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from undrift_bench.zoo.init import he

GROUPS = 8


class PreActivationGN(nn.Module):
    """Two 3×3 convolutions, each after GroupNorm and ReLU, beside a shortcut without parameters.

    Where the width changes, the shortcut is the pooled input with channels of zeros.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(GROUPS, inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(GROUPS, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.stride, self.more = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, before any activation."""
        inner: Tensor = self.conv2(F.relu(self.norm2(self.conv1(F.relu(self.norm1(x))))))
        if self.stride > 1:
            x = F.avg_pool2d(x, self.stride, ceil_mode=True)
        return F.pad(x, (0, 0, 0, 0, 0, self.more)) + inner


class ResNetGN(nn.Module):
    """Three stages of (depth − 2) / 6 blocks, 16, 32 and 64 channels."""

    def __init__(self, depth: int, classes: int) -> None:
        super().__init__()
        assert (depth - 2) % 6 == 0, f"a ResNet of depth {depth} does not exist: depth is 6n + 2"
        blocks = (depth - 2) // 6
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.layer1 = _stage(blocks, 16, 16, 1)
        self.layer2 = _stage(blocks, 16, 32, 2)
        self.layer3 = _stage(blocks, 32, 64, 2)
        self.norm = nn.GroupNorm(GROUPS, 64)
        self.fc = nn.Linear(64, classes)
        he(self)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of images N×3×H×W."""
        features = F.relu(self.norm(self.layer3(self.layer2(self.layer1(self.conv1(x))))))
        logits: Tensor = self.fc(features.mean((2, 3)))
        return logits


def _stage(blocks: int, inputs: int, outputs: int, stride: int) -> nn.Sequential:
    first = PreActivationGN(inputs, outputs, stride)
    return nn.Sequential(first, *(PreActivationGN(outputs, outputs, 1) for _ in range(blocks - 1)))


def resnet26_gn(classes: int = 10) -> ResNetGN:
    """Return a pre-activation ResNet-26 with GroupNorm and fresh weights: 0.37 M parameters."""
    return ResNetGN(26, classes)
