"""Networks by name on the command line, with the preprocessing of their libraries."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torchvision
import transformers
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

import undrift
from support import same
from undrift.cli import main
from undrift.cli.model_packages import of_processor, of_timm, of_torchvision
from undrift.cli.models import load_model
from undrift.images import domain

from .conftest import CLASSES, vit

pytestmark = pytest.mark.filterwarnings("ignore:COLLAPSED:undrift.UndriftWarning")


def photograph(number: int) -> Image.Image:
    """Return an image of uneven size with structure at several scales."""
    pixels = np.random.default_rng(number).integers(0, 256, (9, 11, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((300 + 5 * number, 260), Image.Resampling.BICUBIC)


@pytest.fixture
def work(inside: Path) -> Path:
    """Return the current folder, with photographs in images/."""
    (inside / "images").mkdir()
    for number in range(6):
        photograph(number).save(inside / "images" / f"{number}.png")
    return inside


def run(*words: str) -> None:
    judged = 3 if words[0] == "adapt" else 0  # an untrained network may collapse, and `adapt` says so
    assert main(words) in (0, judged)


def answers(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def of_timm_itself(net: nn.Module) -> Any:
    return timm.data.create_transform(**timm.data.resolve_data_config(model=net), is_training=False)


def test_adapt_and_predict_with_a_network_of_timm(work: Path) -> None:
    net = timm.create_model("resnet18").eval()
    save_file(net.state_dict(), work / "resnet18.safetensors")
    torch.save(net.state_dict(), work / "resnet18.pt")
    assert same(load_model("timm:resnet18", work / "resnet18.pt").network.state_dict(), net.state_dict())
    words = ("images", "--model", "timm:resnet18", "--weights", "resnet18.safetensors")
    run("adapt", *words, "--out", "domain.safetensors", "--epochs", "1")
    run("predict", *words, "--out", "source.csv")
    run("predict", *words, "--domain", "domain.safetensors", "--out", "adapted.csv", "--samples", "2")
    # The source network's answers are those of timm's own transform.
    images = torch.stack([of_timm_itself(net)(photograph(number)) for number in range(6)])
    with torch.no_grad():
        told = net(images).softmax(1).amax(1)
    assert [float(row["probability"]) for row in answers(work / "source.csv")] == pytest.approx(told.tolist(), rel=1e-4)
    model = undrift.load(net, work / "domain.safetensors")
    assert model.preprocess == of_timm(net.pretrained_cfg)
    assert len(answers(work / "adapted.csv")) == 6


def test_stream_and_evaluate_with_a_network_of_torchvision(work: Path) -> None:
    net = torchvision.models.mobilenet_v3_small().eval()
    save_file(net.state_dict(), work / "net.safetensors")
    words = ("images", "--model", "torchvision:mobilenet_v3_small", "--weights", "net.safetensors")
    run("stream", *words, "--method", "tent", "--batch-size", "3", "--answers", "stream.csv")
    assert len(answers(work / "stream.csv")) == 6


def test_adapt_and_predict_with_a_folder_of_hugging_face(work: Path) -> None:
    net = vit().eval()
    net.config.id2label = dict(enumerate(["cat", "dog", "fox", "hen", "owl"]))
    processor = transformers.ViTImageProcessor(size={"height": 64, "width": 64})
    net.save_pretrained(work / "net")
    processor.save_pretrained(work / "net")
    run("adapt", "images", "--model", "hf:net", "--out", "domain.safetensors", "--epochs", "1")
    run("predict", "images", "--model", "hf:net", "--out", "source.csv")
    with torch.no_grad():
        given = processor([photograph(number) for number in range(6)], return_tensors="pt")
        told = net(**given).logits.softmax(1).max(1)
    found = answers(work / "source.csv")
    assert [row["label"] for row in found] == [net.config.id2label[int(i)] for i in told.indices]
    assert [float(row["probability"]) for row in found] == pytest.approx(told.values.tolist(), rel=1e-3)
    model = undrift.load(net, work / "domain.safetensors")
    assert len(model.classes or ()) == CLASSES
    (batch, _) = next(iter(domain(work / "images", preprocess=model.preprocess).named_batches(6)))
    assert undrift.predict(model, batch, samples=2).probs.shape == (6, CLASSES)


@pytest.mark.parametrize(
    "name", ["resnet18", "convnext_atto", "vit_tiny_patch16_224", "efficientnet_b0", "resnetv2_50x1_bit"]
)
def test_preprocessing_of_timm_is_exact(name: str) -> None:
    net = timm.create_model(name)
    same_images(of_timm_itself(net)(photograph(3)), of_timm(net.pretrained_cfg).image(photograph(3)))


@pytest.mark.parametrize("name", ["resnet18", "vit_b_16", "swin_t", "efficientnet_v2_s"])
def test_preprocessing_of_torchvision_is_exact(name: str) -> None:
    transforms = torchvision.models.get_model_weights(name)["DEFAULT"].transforms()
    same_images(transforms(photograph(3)), of_torchvision(transforms).image(photograph(3)))


def same_images(theirs: Tensor, ours: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "name", ["ViT", "ConvNext", "Bit", "EfficientNet", "DeiT", "Beit", "CLIP", "Siglip", "MobileNetV2", "PoolFormer"]
)
def test_image_processors_of_hugging_face_are_followed(name: str) -> None:
    processor = getattr(transformers, f"{name}ImageProcessor")()
    ours = of_processor(processor).image(photograph(3))
    theirs = processor(photograph(3), return_tensors="pt")["pixel_values"][0]
    assert ours.shape == theirs.shape


def test_an_image_processor_that_does_something_else_is_named() -> None:
    with pytest.raises(undrift.OptionError, match=r"a LevitImageProcessor, whose images are [\d.]+ grey levels from"):
        of_processor(transformers.LevitImageProcessor())


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["timm:resnet_18", "torchvision:resnet_18"])
def test_unknown_names_say_so(name: str) -> None:
    package = name.partition(":")[0]
    with pytest.raises(undrift.DataError, match=f"a name that {package} knows.* Did you mean {package}:resnet18"):
        load_model(name)
