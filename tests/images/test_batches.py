"""Loaders yield images in many wrappings, and labels are never looked at."""

import pytest
import torch
from torch import nn

import undrift
from undrift.posterior.batch import KEYS, device_of, images_of, to_device

X = torch.rand(4, 3, 2, 2)


class Untouchable:
    """A label that raises on being looked at."""

    def __getattribute__(self, name: str) -> object:
        raise AssertionError(f"a label was looked at ({name})")


def test_images_are_found_and_labels_never_looked_at() -> None:
    label = Untouchable()
    for item in (X, (X, label), [X, torch.zeros(4)], ((X, label), label), ({"image": X, "label": label}, label)):
        assert images_of(item) is X
    for key in KEYS:
        assert images_of({"labels": label, key: X}) is X
    assert images_of({"x": label, "pixel_values": X}) is X


@pytest.mark.parametrize(
    ("item", "what"),
    [
        ({"label": X}, r"dicts with 'label'.*pixel_values"),
        ("photo.png", "str objects"),
        ([], "list objects"),
        ((torch.zeros(3, 2, 2), torch.zeros(3, 2, 2)), "2 separate images.*stack"),
        (torch.zeros(4, 3, 2, 2, dtype=torch.uint8), r"uint8.*/ 255"),
        (torch.zeros(4), r"shape \(4,\)"),
    ],
)
def test_other_things_are_refused(item: object, what: str) -> None:
    with pytest.raises(undrift.DataError, match=what):
        images_of(item)


def test_images_follow_the_network() -> None:
    assert device_of(nn.ReLU()).type == "cpu"
    assert device_of(nn.BatchNorm1d(2, affine=False)).type == "cpu"
    assert device_of(nn.Linear(1, 1, device="meta")).type == "meta"
    assert to_device(X, nn.Linear(1, 1, device="meta")).device.type == "meta"


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_images_take_the_precision_of_a_network_in_half_precision(half: torch.dtype) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2)).to(half).eval()
    assert to_device(X, net).dtype == half
    assert to_device(torch.zeros(2, 3, dtype=torch.long), net).dtype == torch.long
    with torch.autocast("cpu", torch.bfloat16):
        assert to_device(X, net) is X
    assert to_device(X, undrift.perturb(net)).dtype == half  # whose log-variances are in float32
    net[1].float()  # as norm layers often stay
    assert to_device(X, net).dtype == half


def test_a_network_in_half_precision_takes_images_as_they_come() -> None:
    # Not bfloat16: some CPUs announce instructions for it that they cannot run.
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2)).half().eval()
    assert undrift.predict(net, X).probs.shape == (4, 2)
    model = undrift.perturb(net, norm_statistics="source")
    assert undrift.predict(model, X, samples=2).probs.shape == (4, 2)
    assert len(list(undrift.stream(model, [X], likelihood=undrift.entropy))) == 1
    assert len(undrift.adapt(model, X, undrift.Shot(), epochs=1).steps) == 1
    assert 0 <= undrift.evaluate(model, [(X, torch.tensor([0, 1, 0, 1]))], samples=2).results[0].scores.accuracy <= 1


def test_other_networks_get_their_images_as_they_are() -> None:
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half())
    for net in (nn.Linear(2, 2), nn.Linear(2, 2).double(), mixed, mixed[::-1], nn.ReLU()):
        assert to_device(X, net) is X
        assert to_device(X.half(), net).dtype == torch.float16
