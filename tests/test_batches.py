"""Loaders yield images in many wrappings, and labels are never looked at."""

import pytest
import torch
from torch import nn

import undrift
from undrift._batches import KEYS, device_of, images_of, to_device

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
