"""ResNeXt-29 (4×32d) for 32×32 images (Xie et al. 2017), with the parameter names of AugMix's checkpoints.

Input: (x − 0.5) / 0.5 of [0, 1] images.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from undrift_bench.zoo.init import he

CARDINALITY = 4
BASE_WIDTH = 32
EXPANSION = 4


class GroupedBottleneck(nn.Module):
    """1×1 reduce, grouped 3×3, 1×1 expand, beside a shortcut."""

    def __init__(self, inputs: int, planes: int, stride: int) -> None:
        super().__init__()
        width = CARDINALITY * (planes * BASE_WIDTH // 64)
        outputs = planes * EXPANSION
        self.conv_reduce = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn_reduce = nn.BatchNorm2d(width)
        self.conv_conv = nn.Conv2d(width, width, 3, stride, padding=1, groups=CARDINALITY, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.conv_expand = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn_expand = nn.BatchNorm2d(outputs)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or inputs != outputs:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Return the activated sum of both branches."""
        out = F.relu(self.bn_reduce(self.conv_reduce(x)))
        out = F.relu(self.bn(self.conv_conv(out)))
        out = self.bn_expand(self.conv_expand(out))
        return F.relu(out + (x if self.downsample is None else self.downsample(x)))


def _stage(inputs: int, planes: int, stride: int) -> nn.Sequential:
    rest = (GroupedBottleneck(planes * EXPANSION, planes, 1) for _ in range(2))
    return nn.Sequential(GroupedBottleneck(inputs, planes, stride), *rest)


class ResNeXt29(nn.Module):
    """A 3×3 stem and three stages of three bottlenecks: 3·3·3 + 2 = 29 layers."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv_1_3x3 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        self.bn_1 = nn.BatchNorm2d(64)
        self.stage_1 = _stage(64, 64, 1)
        self.stage_2 = _stage(64 * EXPANSION, 128, 2)
        self.stage_3 = _stage(128 * EXPANSION, 256, 2)
        self.classifier = nn.Linear(256 * EXPANSION, classes)
        he(self)
        nn.init.kaiming_normal_(self.classifier.weight)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of images N×3×H×W."""
        features = F.relu(self.bn_1(self.conv_1_3x3(x)))
        features = self.stage_3(self.stage_2(self.stage_1(features)))
        logits: Tensor = self.classifier(features.mean((2, 3)))
        return logits


def resnext29(classes: int = 100) -> ResNeXt29:
    """Return a ResNeXt-29 4×32d with fresh weights: 6.9 M parameters, CIFAR-100-C's usual source model."""
    return ResNeXt29(classes)
