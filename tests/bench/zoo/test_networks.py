"""The networks have the published sizes, shapes and names."""

import copy
import io
from pathlib import Path

import pytest
import torch
from torch import nn

from undrift_bench import zoo

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"


def parameters(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("wrn28_10", 36_479_194),
        ("wrn40_2", 2_243_546),
        ("resnext29", 6_900_132),
        ("resnet50", 25_557_032),
        ("resnet50_v1", 25_557_032),
        ("digits", 61_050),
    ],
)
def test_number_of_parameters(name, expected):
    with torch.device("meta"):
        assert parameters(zoo.build(name)) == expected


@pytest.mark.parametrize("name", ["wrn40_2", "resnext29", "digits"])
def test_logits_have_one_column_a_class(name):
    channels, side = (1, 28) if name == "digits" else (3, 32)
    network = zoo.build(name, classes=7).eval()
    with torch.no_grad():
        logits = network(torch.rand(2, channels, side, side))
    assert logits.shape == (2, 7)
    assert logits.isfinite().all()


def test_both_layouts_of_resnet50_share_names_and_shapes_but_not_outputs():
    plain, first = zoo.resnet50(5).eval(), zoo.resnet50(5, v1=True).eval()
    assert {key: value.shape for key, value in plain.state_dict().items()} == {
        key: value.shape for key, value in first.state_dict().items()
    }
    first.load_state_dict(plain.state_dict())
    assert (plain.layer2[0].conv1.stride, plain.layer2[0].conv2.stride) == ((1, 1), (2, 2))
    assert (first.layer2[0].conv1.stride, first.layer2[0].conv2.stride) == ((2, 2), (1, 1))
    assert (plain.bn1.eps, first.bn1.eps) == (1e-5, 1e-3)
    images = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        assert plain(images).shape == (1, 5)
        assert not torch.allclose(plain(images), first(images))


def test_shot_network_has_the_papers_count_of_perturbed_numbers():
    with torch.device("meta"):
        network = zoo.shot_resnet50(65)
    channels = sum(module.out_channels for module in network.modules() if isinstance(module, nn.Conv2d))
    affine = sum(
        2 * module.num_features for module in network.modules() if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d))
    )
    assert channels + affine + network.bottleneck.linear.weight.numel() == 604_480
    trunk = parameters(network.backbone) + network.bottleneck.linear.weight.numel()
    assert trunk + parameters(network.bottleneck.norm) == 24_032_832


def test_shot_classifier_trains_copies_and_pickles():
    classifier = zoo.shot_resnet50(3, width=8).classifier
    twin = copy.deepcopy(classifier)
    buffer = io.BytesIO()
    torch.save(classifier, buffer)
    features = torch.randn(4, 8)
    optimiser = torch.optim.SGD(classifier.parameters(), 0.1)
    loss = nn.functional.cross_entropy(classifier(features), torch.tensor([0, 1, 2, 0]))
    loss.backward()
    optimiser.step()
    assert all(parameter.grad is not None for parameter in classifier.parameters())
    assert not torch.equal(classifier(features), twin(features))
    torch.testing.assert_close(twin.weight.norm(dim=1, keepdim=True), twin.weight_g)


def test_shot_features_are_the_bottlenecks():
    network = zoo.shot_resnet50(3).eval()
    seen = []
    network.bottleneck.register_forward_hook(lambda *args: seen.append(args[-1]))
    with torch.no_grad():
        logits = network(torch.rand(2, 3, 32, 32))
        torch.testing.assert_close(network.classifier(seen[0]), logits)
    assert seen[0].shape == (2, 256)


@pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/data, with the real checkpoints, is not there")
@pytest.mark.parametrize(
    ("name", "file", "classes"),
    [("wrn40_2", "cifar10/wrn40_2.safetensors", 10), ("resnext29", "cifar100/resnext29.safetensors", 100)],
)
def test_real_checkpoints_load_strictly(name, file, classes):
    network = zoo.load(name, SHARED / file)
    assert not network.training
    assert {parameter.dtype for parameter in network.parameters()} == {torch.float32}
    with torch.no_grad():
        assert network(torch.rand(1, 3, 32, 32)).shape == (1, classes)
