"""ResNet-50 with SHOT's bottleneck and weight-normalised classifier (Liang et al. 2020).

    images → backbone → 2048 → bottleneck (Linear, BatchNorm1d) → 256 → classifier → logits

SHOT adapts backbone and bottleneck and leaves the classifier alone; its features are the bottleneck's output.
"""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from undrift_bench.zoo.resnet import FEATURES, Trunk50


class WeightNormLinear(nn.Module):
    """A linear layer with weight = weight_g · weight_v / ‖weight_v‖, one length a class.

    Written out rather than made with `parametrizations.weight_norm`, which renames the parameters and refuses to be
    pickled; `weight_g` and `weight_v` are the names in SHOT's own checkpoints. As it is no `nn.Linear`, nothing that
    looks for linear layers (a perturbation, say) takes `weight_v` for the weight.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight_v = nn.Parameter(nn.init.xavier_normal_(torch.empty(outputs, inputs)))
        self.weight_g = nn.Parameter(self.weight_v.detach().norm(dim=1, keepdim=True))
        self.bias = nn.Parameter(torch.zeros(outputs))

    @property
    def weight(self) -> Tensor:
        """The effective weight, classes × features."""
        return self.weight_g * F.normalize(self.weight_v, dim=1)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of features N×inputs."""
        return F.linear(x, self.weight, self.bias)


class ShotResNet50(nn.Module):
    """`backbone`, `bottleneck` and `classifier`, in this order."""

    def __init__(self, classes: int, width: int, v1: bool) -> None:
        super().__init__()
        self.backbone = Trunk50(v1)
        linear = nn.Linear(FEATURES, width)
        nn.init.xavier_normal_(linear.weight)
        nn.init.zeros_(linear.bias)
        self.bottleneck = nn.Sequential(OrderedDict(linear=linear, norm=nn.BatchNorm1d(width)))
        self.classifier = WeightNormLinear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of images N×3×H×W."""
        logits: Tensor = self.classifier(self.bottleneck(self.backbone(x)))
        return logits


def shot_resnet50(classes: int, width: int = 256, v1: bool = False) -> ShotResNet50:
    """Return SHOT's network with fresh weights; `zoo.transfer` fills its backbone from an ImageNet checkpoint.

    Args:
        width: features that the bottleneck leaves.
        v1: the backbone's first layout: stride on the first 1×1 convolution, BatchNorm eps 1e-3.
    """
    return ShotResNet50(classes, width, v1)
