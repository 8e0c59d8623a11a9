"""Networks from a few words: the zoo's, the user's own, and those of packages that stand-ins play here."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import undrift
from faults import installed, missing
from undrift import DataError, OptionError, UndriftWarning
from undrift.cli.model_packages import of_huggingface, of_processor, of_timm, of_torchvision
from undrift.cli.models import load_model, parse_arguments
from undrift.images import Preprocess
from undrift_bench import zoo

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def net(classes: int = 4) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, classes))


@pytest.fixture
def own(inside: Path) -> Path:
    (inside / "own_net.py").write_text(
        "from torch import nn\n"
        "from undrift.images import Preprocess\n"
        "def make(classes=4):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(12, classes)).train()\n"
        "def learned():\n"
        "    net = make()\n"
        "    for p in net.parameters(): nn.init.ones_(p)\n"
        "    return net\n"
        "def knows():\n"
        "    net = make()\n"
        "    net.preprocess = Preprocess(crop=2)\n"
        "    return net\n"
    )
    (inside / "needs_more.py").write_text("import a_package_that_is_not_there\n")
    sys.modules.pop("own_net", None)
    return inside


def test_the_users_own_function_from_the_current_folder(own: Path) -> None:
    found = load_model("own_net:make", arguments={"classes": 5})
    assert (found.network[1].out_features, found.network.training, found.preprocess) == (5, False, None)
    assert found.untrained
    assert not load_model("own_net:learned").untrained
    assert load_model("own_net:knows").preprocess == Preprocess(crop=2)
    weights = {"1.weight": torch.ones(4, 12), "1.bias": torch.zeros(4)}
    save_file(weights, own / "w.safetensors")
    torch.save({"state_dict": weights}, own / "w.pt")
    for name in ("w.safetensors", "w.pt"):
        loaded = load_model("own_net:make", own / name)
        assert torch.equal(loaded.network[1].weight, weights["1.weight"])
        assert not loaded.untrained
        assert loaded.name == f"own_net:make {name}"


def test_the_users_own_function_that_cannot_be(own: Path) -> None:
    for name, fact in (
        ("own_net:mke", "Did you mean own_net:make"),
        ("own_nte:make", "there is no module 'own_nte'"),
        ("own_net.py:make", "Did you mean own_net:make"),
        ("needs_more:make", "a_package_that_is_not_there"),
        ("own_net.make", "Did you mean own_net:make"),
        ("wrn28-10", "Did you mean 'wrn28_10'"),
        ("timm/resnet18", "Did you mean timm:resnet18"),
        ("resnet18", "needed: one of these, timm:NAME"),
        ("wrn40_2", "named without weights"),
    ):
        with pytest.raises(OptionError, match=fact):
            load_model(name)
    with pytest.raises(OptionError, match="raised TypeError"):
        load_model("own_net:make", arguments={"depth": 3})
    with pytest.raises(OptionError, match="no network was named"):
        load_model()


def test_arguments() -> None:
    assert parse_arguments(("a=1", "b=x", "c=True", "d=[1, 2]", "e=")) == {
        "a": 1,
        "b": "x",
        "c": True,
        "d": [1, 2],
        "e": "",
    }
    with pytest.raises(OptionError, match="NAME=VALUE"):
        parse_arguments(("depth",))


def test_the_zoo_with_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = zoo.build("digits", 7)
    save_file(plain.state_dict(), tmp_path / "plain.safetensors")
    found = load_model("digits", tmp_path / "plain.safetensors")
    assert found.preprocess == zoo.preprocess("digits")
    assert torch.equal(found.network.fc.weight, plain.fc.weight)
    with pytest.raises(OptionError, match="does not say which network"):
        load_model(None, tmp_path / "plain.safetensors")
    with pytest.raises(OptionError, match="takes no depth"):
        load_model("digits", tmp_path / "plain.safetensors", {"depth": 3})


def test_a_file_that_knows_what_it_is(tmp_path: Path) -> None:
    text = {
        "undrift_source": "1",
        "network": "digits",
        "class_names": '["a", "b"]',
        "preprocess": '{"mean": [0.1], "std": [0.5], "resize": null, "crop": 28, "interpolation": "bicubic"}',
    }
    save_file(zoo.build("digits", 2).state_dict(), tmp_path / "s.safetensors", text)
    found = load_model(None, tmp_path / "s.safetensors")
    assert found.classes == ("a", "b")
    assert found.preprocess == Preprocess((0.1,), (0.5,), None, 28, "bicubic")
    save_file(zoo.build("digits", 2).state_dict(), tmp_path / "t.safetensors", {**text, "class_names": "[1"})
    with pytest.raises(DataError, match=r"header of .* is damaged"):
        load_model(None, tmp_path / "t.safetensors")


# Packages --------------------------------------------------------------------------------------------------------


Pretend = Callable[..., None]


@pytest.fixture
def pretend() -> Iterator[Pretend]:
    """Return what lets a package be installed that has this content and no more."""
    with ExitStack() as packages:
        yield lambda name, **content: packages.enter_context(installed(name, **content))


def test_timm(pretend: Pretend, tmp_path: Path) -> None:
    asked: list[Any] = []

    def create_model(name: str, pretrained: bool = False, **arguments: Any) -> nn.Module:
        if name != "tiny_vit":
            raise RuntimeError(f"Unknown model ({name})")
        asked.append((pretrained, arguments))
        made = net(arguments.get("num_classes", 4))
        made.pretrained_cfg = {
            "input_size": (3, 224, 224),
            "crop_pct": 0.9,
            "interpolation": "bicubic",
            "mean": (0.5,) * 3,
            "std": (0.5,) * 3,
            "crop_mode": "center",
        }
        return made

    pretend("timm", create_model=create_model, list_models=lambda: ["tiny_vit"])
    found = load_model("timm:tiny_vit")
    assert found.preprocess == Preprocess((0.5,) * 3, (0.5,) * 3, 248, 224, "bicubic")
    save_file(net(6).state_dict(), tmp_path / "w.safetensors")
    load_model("timm:tiny_vit", tmp_path / "w.safetensors", {"num_classes": 6})
    assert asked == [(True, {}), (False, {"num_classes": 6})]
    with pytest.raises(DataError, match=r"Unknown model.*weights it can download\. .*or give --weights FILE"):
        load_model("timm:nothing")
    with pytest.raises(DataError, match=r"needed: a name that timm knows\. Did you mean timm:tiny_vit\?"):
        load_model("timm:tinyvit", tmp_path / "w.safetensors")
    with pytest.raises(DataError, match=r"of another shape.*such as --model-args num_classes"):
        load_model("timm:tiny_vit", tmp_path / "w.safetensors")


def test_torchvision(pretend: Pretend) -> None:
    class Interpolation(Enum):
        BILINEAR = "bilinear"

    @dataclass
    class Transforms:
        crop_size: list[int] = field(default_factory=lambda: [224])
        resize_size: list[int] = field(default_factory=lambda: [232])
        mean: list[float] = field(default_factory=lambda: list(IMAGENET[0]))
        std: list[float] = field(default_factory=lambda: list(IMAGENET[1]))
        interpolation: Interpolation = Interpolation.BILINEAR

    entry = SimpleNamespace(transforms=Transforms, meta={"categories": ["a", "b", "c", "d"]})
    asked: list[Any] = []

    def get_model(name: str, weights: Any = None, **arguments: Any) -> nn.Module:
        asked.append(weights)
        return net(**arguments)

    pretend("torchvision")
    pretend(
        "torchvision.models",
        get_model=get_model,
        list_models=lambda: ["resnet50"],
        get_model_weights=lambda name: {"DEFAULT": entry, "IMAGENET1K_V1": entry},
    )
    found = load_model("torchvision:resnet50", arguments={"weights": "IMAGENET1K_V1"})
    assert found.preprocess == Preprocess(*IMAGENET, 232, 224)
    assert (found.classes, asked) == (("a", "b", "c", "d"), [entry])
    with pytest.raises(DataError, match="KeyError"):
        load_model("torchvision:resnet50", arguments={"weights": "V9"})


def test_huggingface(pretend: Pretend) -> None:
    class Output:
        def __init__(self, logits: Tensor) -> None:
            self.logits = logits

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()
            self.config = SimpleNamespace(id2label={1: "dog", 0: "cat", 3: "owl", 2: "ant"})

        def forward(self, pixel_values: Tensor) -> Output:
            return Output(self.inner(pixel_values))

    asked: dict[str, Any] = {}

    def from_pretrained(name: str, **arguments: Any) -> nn.Module:
        asked.update(arguments)
        return Classifier()

    config = {
        "do_resize": True,
        "size": {"height": 224, "width": 224},
        "resample": 3,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    processor = Processor(config, Preprocess((0.5,) * 3, (0.5,) * 3, (224, 224), None, "bicubic"))
    pretend(
        "transformers",
        AutoModelForImageClassification=SimpleNamespace(from_pretrained=from_pretrained),
        AutoImageProcessor=SimpleNamespace(from_pretrained=lambda name: processor),
    )
    found = load_model("hf:google/vit")
    assert found.classes == ("cat", "dog", "ant", "owl")
    assert found.preprocess == Preprocess((0.5,) * 3, (0.5,) * 3, (224, 224), None, "bicubic")
    assert asked == {"use_safetensors": True}


class Processor:
    """An image processor that does something else than its configuration says, or the same."""

    def __init__(self, config: dict[str, Any], does: Preprocess) -> None:
        self.config, self.does = config, does

    def to_dict(self) -> dict[str, Any]:
        return self.config

    def __call__(self, image: Any, return_tensors: str) -> dict[str, Tensor]:
        assert return_tensors == "pt"
        return {"pixel_values": self.does(torch.from_numpy(image).permute(2, 0, 1)[None])}


def test_an_image_processor_is_tried_on_an_image() -> None:
    config = {"size": {"shortest_edge": 64}, "do_center_crop": True, "crop_size": 64, "resample": 2}
    said = Preprocess(resize=64, crop=64)
    config["do_normalize"] = False
    assert of_processor(Processor(config, said)) == said
    for does, fact in (
        (Preprocess(resize=73, crop=64), r"a Processor, whose images are \d\.\d grey levels from"),
        (Preprocess(std=(0.5,) * 3, resize=64, crop=64), "grey levels"),
        (Preprocess(resize=64), "whose images are 64×72 where its settings say 64×64"),
    ):
        with pytest.raises(OptionError, match=fact):
            of_processor(Processor(config, does))


def test_huggingface_without_an_image_processor(pretend: Pretend, tmp_path: Path) -> None:
    made = net()
    made.config = SimpleNamespace(id2label={})

    def lost(name: str) -> Any:
        raise OSError(f"Can't load image processor for {name!r}")

    pretend(
        "transformers",
        AutoModelForImageClassification=SimpleNamespace(from_pretrained=lambda name, use_safetensors: made),
        AutoImageProcessor=SimpleNamespace(from_pretrained=lost),
    )
    found = load_model(f"hf:{tmp_path}")
    assert (found.network, found.preprocess) == (made, None)
    facts = r"image processor of hf:.*could not be made.*needed: its preprocessor_config\.json.*--preprocess none"
    with pytest.raises(DataError, match=facts):
        load_model("hf:google/vit")  # not a folder: it may only not have been downloaded
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(DataError, match=facts):
        load_model(f"hf:{tmp_path}")


def test_a_package_that_is_not_installed() -> None:
    for key, package in (("timm", "timm"), ("torchvision", "torchvision"), ("hf", "transformers")):
        with missing(package), pytest.raises(OptionError, match=f"{package} is not installed"):
            load_model(f"{key}:x")


def test_configurations() -> None:
    squash = of_timm({"input_size": (3, 384, 384), "crop_pct": 1.0, "crop_mode": "squash", "interpolation": "bilinear"})
    assert squash == Preprocess(*IMAGENET, (384, 384), 384)
    base = {"image_mean": IMAGENET[0], "image_std": IMAGENET[1], "resample": 2}
    # ConvNeXT: below 384 the shorter side is size / crop_pct and size is cropped; from 384 on it is squeezed.
    assert of_huggingface({**base, "size": {"shortest_edge": 224}, "crop_pct": 0.875}).resize == 256
    assert of_huggingface({**base, "size": {"shortest_edge": 384}, "crop_pct": 1.0}).resize == (384, 384)
    cropped = of_huggingface({**base, "size": 256, "do_center_crop": True, "crop_size": {"height": 224, "width": 224}})
    assert cropped == Preprocess(*IMAGENET, 256, 224)
    image = torch.randint(0, 256, (1, 3, 4, 4), dtype=torch.uint8)
    doubled = of_huggingface({**base, "do_resize": False, "rescale_factor": 2 / 255})  # to [0, 2]
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in IMAGENET)
    torch.testing.assert_close(doubled(image), (image * (2 / 255) - mean) / std)
    # EfficientNet's: to [−1, 1] first; and divided once more with the classifier.
    shifted = of_huggingface({**base, "do_resize": False, "rescale_factor": 2 / 255, "rescale_offset": True})
    torch.testing.assert_close(shifted(image), (image * (2 / 255) - 1 - mean) / std)
    twice = of_huggingface({**base, "do_resize": False, "include_top": True})
    torch.testing.assert_close(twice(image), (image / 255 - mean) / std / std)
    unchanged = of_huggingface({"do_resize": False, "do_rescale": False, "do_normalize": False, "resample": 2})
    torch.testing.assert_close(unchanged(image), image.float())


def test_configurations_that_we_cannot_follow(pretend: Pretend) -> None:
    for read, config in (
        (of_timm, {"crop_mode": "border", "input_size": (3, 224, 224)}),
        (of_timm, {"input_size": (3, 224, 160)}),
        (of_huggingface, {"size": {"longest_edge": 300}}),
        (of_huggingface, {"size": 224, "resample": 1}),
        (of_torchvision, object()),
    ):
        with pytest.raises(OptionError, match="needed: a resize"):
            read(config)
    border = net()
    border.pretrained_cfg = {"crop_mode": "border"}
    pretend("timm", create_model=lambda name, pretrained: border)
    with pytest.warns(UndriftWarning, match="--crop"):
        assert load_model("timm:x").preprocess is None
    assert Preprocess(*IMAGENET, 256, 224) == undrift.images.IMAGENET


def test_weights_that_are_not_there_are_called_so_before_their_network_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no file .*nothing\.safetensors; needed"):
        load_model(None, weights=tmp_path / "nothing.safetensors")
