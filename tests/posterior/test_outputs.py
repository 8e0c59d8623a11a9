"""Classifiers return their logits in many wrappings; what is no classifier's output is refused."""

from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import undrift

Z, X = torch.randn(4, 3), torch.zeros(4, 2)


class Returning(nn.Module):
    """A network that returns what it is told."""

    def __init__(self, output: object) -> None:
        super().__init__()
        self.output = output

    def forward(self, x: Tensor) -> object:
        return self.output


@pytest.mark.parametrize(
    "output",
    [
        Z,
        (Z, "aux"),
        [Z, torch.zeros(4, 7)],
        {"logits": Z, "loss": None},
        {"out": Z, "aux": torch.zeros(4, 7)},
        SimpleNamespace(logits=Z),
        namedtuple("Output", ["aux", "logits"])(torch.zeros(4, 7), Z),
    ],
)
def test_logits_are_found(output: object) -> None:
    assert torch.equal(undrift.predict(Returning(output), X).probs, Z.softmax(1))


def test_half_precision_is_read_in_float32() -> None:
    assert undrift.predict(Returning(Z.bfloat16()), X).probs.dtype == torch.float32
    assert undrift.predict(Returning(Z.double()), X).probs.dtype == torch.float64


@pytest.mark.parametrize("output", [Z[:, :1], Z[:, 0], (Z[:, :1], "aux"), {"logits": Z[:, 0]}])
def test_one_logit_tells_two_classes_apart(output: object) -> None:
    """Networks trained with binary_cross_entropy_with_logits return one, often squeezed."""
    p = undrift.predict(Returning(output), X)
    assert torch.allclose(p.probs[:, 1], Z[:, 0].sigmoid())
    assert torch.equal(p.label, (Z[:, 0] > 0).long())


def test_one_logit_of_one_image_may_be_squeezed_to_a_number() -> None:
    assert undrift.predict(Returning(Z[0, 0]), X[:1]).probs.shape == (1, 2)
    with pytest.raises(undrift.OutputError, match="3 rows of logits for 1 image"):
        undrift.predict(Returning(Z[0]), X[:1])


def test_one_logit_per_pixel_is_a_map_of_two_classes() -> None:
    net = nn.Conv2d(3, 1, 3, padding=1)
    images = torch.randn(4, 3, 6, 6)
    p = undrift.predict(net, images)
    assert torch.equal(p.label, (net(images)[:, 0] > 0).long())


@pytest.mark.parametrize(
    ("output", "what"),
    [
        (torch.zeros(4, 3, 1, 1), r"\(4, 3, 1, 1\).*flatten"),
        (torch.zeros(4, 1, 1, 1), r"\(4, 1, 1, 1\).*flatten"),
        (torch.zeros(4, 7, 3), r"\(4, 7, 3\).*Pool tokens"),
        (torch.zeros(4, 3, dtype=torch.int64), "int64.*before the arg max"),
        ({"output": Z}, "a dict with 'output'.*logits"),
        ({}, "no entries"),
        ((), "a tuple"),
        (None, "a NoneType"),
        ("cat", "a str"),
        (SimpleNamespace(boxes=Z), "a SimpleNamespace"),
    ],
)
def test_what_is_not_a_classifiers_output_is_refused(output: object, what: str) -> None:
    with pytest.raises(undrift.OutputError, match=what) as caught:
        undrift.predict(Returning(output), X)
    assert "batch × classes" in str(caught.value)
