"""A network adapts whatever its last layer is, or says what it should return."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import undrift
from support import convnet, images


@pytest.mark.parametrize("verb", ["adapt", "stream"])
def test_probabilities_in_place_of_logits_are_warned_of_once_with_the_callers_line(verb: str) -> None:
    net = nn.Sequential(convnet(), nn.Softmax(1))

    def run(net: nn.Module) -> None:
        if verb == "adapt":
            undrift.adapt(net, images(64), method="tent", epochs=2)
        else:
            list(undrift.stream(net, images(64).split(16), method="tent"))

    with pytest.warns(undrift.UndriftWarning, match=r"sum to 1.*needed: logits.*Leave the last softmax out") as caught:
        run(net)
    assert [Path(each.filename).name for each in caught] == [Path(__file__).name]
    net[1] = nn.LogSoftmax(1)
    run(undrift.remove(net) if verb == "adapt" else net)


class Ending(nn.Module):
    """A network of several heads, which returns what `ends` says."""

    def __init__(self, *ends: str, **heads: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.ends = ends
        for name, classes in heads.items():
            self.add_module(name, nn.Linear(8, classes))

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        z = self.body(x)
        found = [z if end == "features" else self.get_submodule(end)(z) for end in self.ends]
        return tuple(found) if len(found) > 1 else found[0]


def test_one_logit_adapts_as_two_classes_over_epochs_and_in_a_stream() -> None:
    torch.manual_seed(0)
    net = Ending("fc", fc=1)
    history = undrift.adapt(net, images(64), epochs=1)
    assert history.verdict is not None
    assert "of 2 classes" in str(history.verdict)
    assert undrift.predict(history.model, images(8)).probs.shape == (8, 2)
    assert [p.probs.shape for p in undrift.stream(history.model.remove(), images(64).split(32))] == [(32, 2)] * 2


def test_one_probability_in_place_of_a_logit_is_warned_of() -> None:
    net = nn.Sequential(Ending("fc", fc=1), nn.Sigmoid())
    with pytest.warns(undrift.UndriftWarning, match=r"from 0 to 1 per image.*needed: logits.*last sigmoid"):
        undrift.adapt(net, images(64), method="tent", epochs=1)


def test_features_in_front_of_the_logits_are_warned_of() -> None:
    with pytest.warns(undrift.UndriftWarning, match=r"8 numbers per image, and its layer 'fc' gives 5.*logits first"):
        undrift.adapt(Ending("features", "fc", fc=5), images(64), method="tent", epochs=1)
    undrift.adapt(Ending("fc", "features", fc=5), images(64), method="tent", epochs=1)  # warnings are errors


def chain(last: str) -> nn.Module:
    """Return a network of three linear layers, as in many first examples: fc1, fc2, and its classifier."""
    net = nn.Sequential()
    net.add_module("flat", nn.Flatten())
    for name, (before, after) in {"fc1": (192, 7), "fc2": (7, 6), last: (6, 5)}.items():
        net.add_module(name, nn.Linear(before, after))
    return net


@pytest.mark.parametrize("last", ["out", "output", "classifier"])
def test_hidden_layers_called_fc_are_not_the_classifier(last: str) -> None:
    model = undrift.adapt(chain(last), images(64), epochs=1).model
    assert model is not None
    assert model.options.frozen == (last,)


def test_a_wrongly_guessed_classifier_is_warned_of() -> None:
    with pytest.warns(undrift.UndriftWarning, match=r"'fc2' gives 6.*call the layer that is 'classifier'"):
        undrift.adapt(chain("answers"), images(64), epochs=1)


def test_a_network_of_convolutions_alone_adapts() -> None:
    """As SqueezeNet: a 1×1 convolution gives the classes, and their maps are averaged."""
    torch.manual_seed(0)
    body = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 5, 1)]
    model = undrift.adapt(nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten()), images(64), epochs=1).model
    assert model is not None
    assert model.options.frozen == ("3",)
    assert undrift.predict(model, images(8)).probs.shape == (8, 5)
