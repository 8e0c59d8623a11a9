"""Loaders yield images in many wrappings, and labels are never looked at."""

import pytest
import torch
from torch import Tensor, nn

import undrift

X = torch.rand(4, 3, 2, 2)
KEYS = ("pixel_values", "image", "images", "x", "input", "inputs", "img", "data")


class Untouchable:
    """A label that raises on being looked at."""

    def __getattribute__(self, name: str) -> object:
        raise AssertionError(f"a label was looked at ({name})")


class Seeing(nn.Module):
    """A network that keeps the images it was shown."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(*(parts or (nn.Flatten(), nn.Linear(12, 2))))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return self.net(x)


def shown(net: Seeing, item: object) -> Tensor:
    """Return what the network sees of one item of a loader."""
    undrift.predict(net, [item])
    return net.seen[-1]


def test_images_are_found_and_labels_never_looked_at() -> None:
    label, net = Untouchable(), Seeing()
    for item in (X, (X, label), [X, torch.zeros(4)], ((X, label), label), ({"image": X, "label": label}, label)):
        assert torch.equal(shown(net, item), X)
    for key in KEYS:
        assert torch.equal(shown(net, {"labels": label, key: X}), X)
    assert torch.equal(shown(net, {"x": label, "pixel_values": X}), X)


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
        undrift.predict(Seeing(), [item])


@pytest.mark.filterwarnings("ignore:the forward pass never called")
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_images_take_the_precision_of_a_network_in_half_precision(half: torch.dtype) -> None:
    # The layers do not run: some CPUs announce instructions for bfloat16 that they cannot run.
    class Unrun(Seeing):
        def forward(self, x: Tensor) -> Tensor:
            self.seen.append(x)
            return torch.zeros(len(x), 2)

    net = Unrun(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).to(half).eval()
    assert shown(net, X).dtype == half
    with torch.autocast("cpu", torch.bfloat16):
        assert shown(net, X).dtype == torch.float32
    model = undrift.perturb(net, norm_statistics="source")  # whose log-variances are in float32
    undrift.predict(model, X, samples=1)
    assert net.seen[-1].dtype == half
    model.remove()
    net.net[1].float()  # as norm layers often stay
    assert shown(net, X).dtype == half


def test_a_network_in_half_precision_takes_images_as_they_come() -> None:
    # Not bfloat16: some CPUs announce instructions for it that they cannot run.
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2)).half().eval()
    assert undrift.predict(net, X).probs.shape == (4, 2)
    model = undrift.perturb(net, norm_statistics="source", stream_optimiser="sgd")  # Adam needs float32
    assert undrift.predict(model, X, samples=2).probs.shape == (4, 2)
    assert len(list(undrift.stream(model, [X], likelihood=undrift.entropy))) == 1
    assert len(undrift.adapt(model, X, undrift.Shot(), epochs=1).steps) == 1
    assert 0 <= undrift.evaluate(model, [(X, torch.tensor([0, 1, 0, 1]))], samples=2).results[0].scores.accuracy <= 1


def test_other_networks_get_their_images_as_they_are() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(12, 2), nn.Linear(2, 2).half()

        def forward(self, x: Tensor) -> Tensor:
            return self.other(self.one(x).half()).float()

    for parts in ((), (nn.Flatten(), Mixed()), (nn.Flatten(), nn.ReLU())):
        assert shown(Seeing(*parts), X).dtype == torch.float32
    assert shown(Seeing().double(), X.double()).dtype == torch.float64
