"""Networks as other libraries make them, with random weights and small images. `make test-models` runs this folder."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
import transformers
from monai.networks import nets
from torch import Tensor, nn

import undrift
from support import same, snapshot

CLASSES, SIDE = 5, 64


def by_timm(name: str, **arguments: Any) -> Callable[[], nn.Module]:
    return lambda: timm.create_model(name, num_classes=CLASSES, **arguments)


def by_torchvision(name: str) -> Callable[[], nn.Module]:
    segmentation = torchvision.models.segmentation
    return lambda: getattr(segmentation, name)(weights=None, weights_backbone=None, num_classes=CLASSES)


def vit() -> nn.Module:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.ViTConfig(num_labels=CLASSES, image_size=SIDE, patch_size=8, **sizes)
    return transformers.ViTForImageClassification(config)


def convnext() -> nn.Module:
    config = transformers.ConvNextConfig(num_labels=CLASSES, hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 2, 1])
    return transformers.ConvNextForImageClassification(config)


def segformer() -> nn.Module:
    sizes = {"hidden_sizes": [8, 16, 16, 32], "depths": [1] * 4, "num_attention_heads": [1, 1, 2, 2]}
    config = transformers.SegformerConfig(num_labels=CLASSES, decoder_hidden_size=16, **sizes)
    return transformers.SegformerForSemanticSegmentation(config)


def densenet() -> nn.Module:
    sizes = {"init_features": 8, "growth_rate": 4, "block_config": (2, 2, 2)}
    return nets.DenseNet(spatial_dims=2, in_channels=3, out_channels=CLASSES, **sizes)


def unet(dimensions: int) -> Callable[[], nn.Module]:
    sizes = {"channels": (4, 8, 16), "strides": (2, 2)}
    return lambda: nets.UNet(dimensions, in_channels=3, out_channels=CLASSES, norm="batch", **sizes)


def segresnet() -> nn.Module:
    return nets.SegResNet(spatial_dims=2, in_channels=3, out_channels=CLASSES, init_filters=8)


SWIN = {"window_size": 4, "embed_dim": 24, "depths": (1, 1, 2, 1), "num_heads": (1, 2, 4, 4)}
CLASSIFIERS: dict[str, Callable[[], nn.Module]] = {
    "timm ResNet": by_timm("resnet18"),
    "timm ConvNeXt": by_timm("convnext_atto", depths=(1, 1, 2, 1)),
    "timm ViT": by_timm("vit_tiny_patch16_224", img_size=SIDE, depth=3),
    "timm Swin": by_timm("swin_tiny_patch4_window7_224", img_size=SIDE, **SWIN),
    "timm EfficientNet": by_timm("efficientnet_b0"),
    "transformers ViT": vit,
    "transformers ConvNeXt": convnext,
    "MONAI DenseNet": densenet,
}
SEGMENTERS: dict[str, Callable[[], nn.Module]] = {
    "torchvision DeepLab": by_torchvision("deeplabv3_mobilenet_v3_large"),
    "torchvision LR-ASPP": by_torchvision("lraspp_mobilenet_v3_large"),
    "transformers SegFormer": segformer,
    "MONAI UNet": unet(2),
    "MONAI UNet of volumes": unet(3),
    "MONAI SegResNet": segresnet,
}


@dataclass(frozen=True)
class Real:
    """A network, images for it, and whether it answers each pixel."""

    net: nn.Module
    images: Tensor
    pixels: bool

    @property
    def probs(self) -> tuple[int, ...]:
        """The shape of its answers to one image."""
        return (CLASSES, *self.images.shape[2:]) if self.pixels else (CLASSES,)


def hooks(net: nn.Module) -> list[Any]:
    return [hook for m in net.modules() for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]


@dataclass(frozen=True)
class Packs:
    """What a network learned of two domains.

    Attributes:
        folder: the packs night and snow.
        exact: night, its mean stored exactly.
        night: images of that domain.
        snow: images of that domain.
        answered: what the network adapted to night answered there.
    """

    folder: Path
    exact: Path
    night: Tensor
    snow: Tensor
    answered: undrift.Prediction


@pytest.fixture(scope="module", params=[*CLASSIFIERS, *SEGMENTERS])
def made(request: pytest.FixtureRequest) -> Real:
    """Return a network of a library, and images for it."""
    torch.manual_seed(0)
    net = (CLASSIFIERS | SEGMENTERS)[request.param]().eval()
    size = (16,) * 3 if request.param.endswith("volumes") else (SIDE,) * 2
    images = torch.rand(8, 3, *size)
    with torch.no_grad():
        net(images[:2])  # transformers puts hooks of its own on a network when it is first called
    return Real(net, images, request.param in SEGMENTERS)


@pytest.fixture
def real(made: Real) -> Iterator[Real]:
    """Yield the network; a test leaves it bit for bit as it was."""
    before, theirs = snapshot(made.net), hooks(made.net)
    yield made
    assert same(snapshot(made.net), before)
    assert hooks(made.net) == theirs


@pytest.fixture(scope="module")
def packs(made: Real, tmp_path_factory: pytest.TempPathFactory) -> Packs:
    """Adapt the network to two domains, once for all tests: by the default recipe, for pixels by entropy."""
    torch.manual_seed(0)
    before = snapshot(made.net)
    folder, exact = tmp_path_factory.mktemp("packs"), tmp_path_factory.mktemp("exact") / "night.safetensors"
    domains = {"snow": 1 - made.images / 5, "night": made.images / 10}
    for name, images in domains.items():
        if made.pixels:
            model = undrift.perturb(made.net, init_fraction=0.04)
            undrift.adapt(model, images, undrift.entropy, epochs=1, batch_size=4, progress=False)
        else:
            model = undrift.adapt(made.net, images, epochs=1, batch_size=4, progress=False).model
        undrift.save(model, folder / f"{name}.safetensors")
        if name == "night":
            answered = undrift.predict(model, images, samples=2, generator=3)
            undrift.save(model, exact, mean="exact")
        model.remove()
    assert same(snapshot(made.net), before)
    return Packs(folder, exact, domains["night"], domains["snow"], answered)
