"""A tiny stand-in for the offline benchmarks on random images, to check that everything runs."""

from collections import OrderedDict

import torch
from torch import Tensor, nn

from undrift.images import Preprocess, TensorDomain
from undrift_bench.bench.offline.sets import DataSet
from undrift_bench.bench.offline.sources import HELD_OUT, Setup
from undrift_bench.train import train_preset

IMAGES, CLASSES, FRAME, CROP = 40, 4, 20, 16
TINY = Preprocess(mean=(0.5,) * 3, std=(0.5,) * 3, resize=(FRAME, FRAME), crop=CROP)


class TinyShot(nn.Module):
    """`backbone`, `bottleneck` and `classifier`, as SHOT's network has them, of two small convolutions."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        first = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        second = nn.Sequential(nn.Conv2d(8, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.backbone = nn.Sequential(OrderedDict(conv1=first, layer1=second, pool=pool))
        self.bottleneck = nn.Sequential(OrderedDict(linear=nn.Linear(8, 6), norm=nn.BatchNorm1d(6)))
        self.classifier = nn.Linear(6, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of images N×3×H×W."""
        logits: Tensor = self.classifier(self.bottleneck(self.backbone(x)))
        return logits


def tiny_setup(dataset: DataSet) -> Setup:
    """Return a tiny network and forty random images a domain, each domain a little brighter than the one before."""
    options = train_preset("shot").replace(epochs=1, batch_size=8, held_out=HELD_OUT)
    domains = list(dataset.images)

    def read(domain: str) -> TensorDomain:
        place = domains.index(domain)
        generator = torch.Generator().manual_seed(place)
        images = torch.randint(0, 128, (IMAGES, 3, FRAME, FRAME), generator=generator, dtype=torch.uint8)
        names = tuple(f"class {number}" for number in range(CLASSES))
        return TensorDomain(domain, images + 25 * place, torch.arange(IMAGES) % CLASSES, names)

    return Setup(dataset, "tiny", options, read, TINY, TinyShot, epochs=2)
