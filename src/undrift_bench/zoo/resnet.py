"""ResNet-50 for 224×224 images (He et al. 2016), with the parameter names of torchvision's checkpoints.

Two layouts share those names. The usual one (v1.5) down-samples in a block's 3×3 convolution and has BatchNorm
eps 1e-5; the first one (v1, Keras' weights) down-samples in the first 1×1 and has eps 1e-3. Nothing in the shapes of
a checkpoint tells them apart, so the layout is part of the network's name: `resnet50`, `resnet50_v1`.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from undrift_bench.zoo.init import he

EXPANSION = 4
FEATURES = 2048
V1_EPS = 1e-3
V15_EPS = 1e-5


class Bottleneck(nn.Module):
    """1×1 reduce, 3×3, 1×1 expand, beside a shortcut."""

    def __init__(self, inputs: int, planes: int, stride: int, v1: bool) -> None:
        super().__init__()
        eps, outputs = (V1_EPS if v1 else V15_EPS), planes * EXPANSION
        self.conv1 = nn.Conv2d(inputs, planes, 1, stride if v1 else 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes, eps)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1 if v1 else stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes, eps)
        self.conv3 = nn.Conv2d(planes, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs, eps)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or inputs != outputs:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(outputs, eps))

    def forward(self, x: Tensor) -> Tensor:
        """Return the activated sum of both branches."""
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return F.relu(out + (x if self.downsample is None else self.downsample(x)))


def _stage(blocks: int, inputs: int, planes: int, stride: int, v1: bool) -> nn.Sequential:
    rest = (Bottleneck(planes * EXPANSION, planes, 1, v1) for _ in range(blocks - 1))
    return nn.Sequential(Bottleneck(inputs, planes, stride, v1), *rest)


class Trunk50(nn.Module):
    """ResNet-50 without its classifier: images N×3×H×W in, features N×2048 out."""

    def __init__(self, v1: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64, V1_EPS if v1 else V15_EPS)
        self.layer1 = _stage(3, 64, 64, 1, v1)
        self.layer2 = _stage(4, 256, 128, 2, v1)
        self.layer3 = _stage(6, 512, 256, 2, v1)
        self.layer4 = _stage(3, 1024, 512, 2, v1)
        he(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return features, averaged over positions."""
        stem = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, stride=2, padding=1)
        out: Tensor = self.layer4(self.layer3(self.layer2(self.layer1(stem))))
        return out.mean((2, 3))


class ResNet50(Trunk50):
    """The trunk and a linear classifier, `fc`."""

    def __init__(self, classes: int, v1: bool = False) -> None:
        super().__init__(v1)
        self.fc = nn.Linear(FEATURES, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of images N×3×H×W."""
        logits: Tensor = self.fc(super().forward(x))
        return logits


def resnet50(classes: int = 1000, v1: bool = False) -> ResNet50:
    """Return a ResNet-50 with fresh weights: 25.6 M parameters with 1,000 classes.

    Args:
        v1: the first layout: stride on the first 1×1 convolution, BatchNorm eps 1e-3.
    """
    return ResNet50(classes, v1)
