"""The source networks of the benchmarks, and a tiny one on random images for trials."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from undrift.images import Preprocess, TensorDomain
from undrift.images.preprocess import RAW
from undrift_bench import zoo
from undrift_bench.bench.harness.request import CannotRun, Request

TINY_CLASSES = 4


@dataclass(frozen=True)
class SourceNetwork:
    """One source network.

    Attributes:
        name: the zoo's.
        title: what tables call it.
        file: its place in the data folder; empty where only `--weights` can name it.
        get: how to come by the file, in words.
        published: whether published values are of this architecture.
        make: builds it without a file; for the tiny one.
    """

    name: str
    title: str
    file: str = ""
    get: str = ""
    published: bool = True
    make: Callable[[], nn.Module] | None = None

    @property
    def preprocess(self) -> Preprocess:
        """What its images must look like, once they have their size."""
        return RAW if self.make else zoo.preprocess(self.name)

    def load(self, request: Request) -> nn.Module:
        """Return the network in eval mode on the CPU; raises `CannotRun` where its file is not there."""
        if self.make is not None:
            return self.make().eval()
        given = request.weights.get(self.name)
        places = [given] if given is not None else [request.data / self.file, request.data / Path(self.file).name]
        found = next((place for place in places if place.is_file()), None)
        if found is None:
            raise CannotRun(
                f"there is no {places[0] if self.file or given else f'file of {self.title}'}; needed: its weights. "
                f"{self.get}"
            )
        return zoo.load(self.name, found)


WRN28_10 = SourceNetwork(
    "wrn28_10",
    "WRN-28-10",
    get="Train it (`undrift train cifar10 --network wrn28_10`) and name it with --wrn2810 FILE.",
)
WRN40_2 = SourceNetwork(
    "wrn40_2",
    "WRN-40-2",
    "cifar10/wrn40_2.safetensors",
    "Name it with --weights wrn40_2=FILE.",
    published=False,
)
RESNEXT29 = SourceNetwork(
    "resnext29", "ResNeXt-29", "cifar100/resnext29.safetensors", "Name it with --weights resnext29=FILE."
)
RESNET50 = SourceNetwork(
    "resnet50_v1", "ResNet-50", "resnet50_imagenet.safetensors", "Name ImageNet's weights with --resnet50 FILE."
)


def tiny_network() -> SourceNetwork:
    """Return a network of two convolutions with random weights, the same each time."""

    def make() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            first = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
            second = nn.Sequential(nn.Conv2d(8, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
            return nn.Sequential(first, second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, TINY_CLASSES))

    return SourceNetwork("tiny", "a tiny random network", published=True, make=make)


def tiny_data(request: Request) -> TensorDomain:  # noqa: ARG001  as every benchmark's
    """Return a few random images of 16×16."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (12, 3, 16, 16), generator=generator, dtype=torch.uint8)
    names = tuple(f"class {number}" for number in range(TINY_CLASSES))
    return TensorDomain("random images", images, torch.arange(12) % TINY_CLASSES, names)
