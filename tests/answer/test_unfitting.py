"""Images that do not fit the network: an error of three facts from every verb, or another precision."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import undrift
from support import same, snapshot

IMAGES = torch.rand(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Wrapped(nn.Module):
    """A network whose layers have names, and that asserts the size of its images as vision transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.head = nn.Conv2d(3, 4, 4, 4), nn.BatchNorm2d(4), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[2:] == (8, 8), f"image size {tuple(x.shape[2:])}"
        return self.head(self.norm(self.stem(x)).relu().flatten(1))


def convnet(channels: int = 3) -> nn.Module:
    body = nn.Sequential(nn.Conv2d(channels, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    return nn.Sequential(body, nn.Linear(144, 5)).eval()


def adapt(net: nn.Module, images: Tensor) -> Any:
    return undrift.adapt(net, images, epochs=1, batch_size=4, least_agreement=0.0, progress=False)


def adapt_perturbed(net: nn.Module, images: Tensor) -> Any:
    return undrift.adapt(undrift.perturb(net), images, undrift.entropy, epochs=1, batch_size=4, progress=False)


def predict_perturbed(net: nn.Module, images: Tensor) -> Any:
    return undrift.predict(undrift.perturb(net), images, samples=3)


VERBS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "adapt": adapt,
    "adapt, perturbed": adapt_perturbed,
    "adapt by gsfda": lambda net, images: undrift.adapt(net, images, method="gsfda", features="0", epochs=1),
    "stream": lambda net, images: next(undrift.stream(net, [images])),
    "stream by tent": lambda net, images: next(undrift.stream(net, [images], method="tent")),
    "stream by cotta": lambda net, images: next(undrift.stream(net, [images], method="cotta")),
    "predict": undrift.predict,
    "predict, perturbed": predict_perturbed,
    "evaluate": lambda net, images: undrift.evaluate(net, [(images, torch.arange(8) % 5)]),
}
GRID = pytest.mark.parametrize("verb", VERBS)


def refused(verb: str, net: nn.Module, images: Tensor, why: str) -> None:
    before = snapshot(net)
    with pytest.raises(undrift.DataError, match=why) as caught:
        VERBS[verb](net, images)
    assert caught.value.__cause__ is not None  # what PyTorch said
    undrift.remove(net) if "perturbed" in verb else None
    assert same(snapshot(net), before)


@GRID
def test_channels_last_images_are_named(verb: str) -> None:
    why = r"are 8 × 8 × 3, their channels last; the layer '0.0' needs N × 3 × height × width.*permute\(0, 3, 1, 2\)"
    refused(verb, convnet(), IMAGES.permute(0, 2, 3, 1), why)


@GRID
def test_a_wrong_number_of_channels_is_named(verb: str) -> None:
    why = r"are 1 × 8 × 8, 1 channel; .* '0.0' needs 3. Repeat .*expand\(-1, 3, -1, -1\)"
    refused(verb, convnet(), IMAGES[:, :1], why)


def test_what_to_do_about_channels_depends_on_them() -> None:
    refused("predict", convnet(), torch.rand(8, 4, 8, 8), r"4 channels; .*needs 3. Leave the alpha.*\[:, :3\]")
    refused("predict", convnet(1), IMAGES, r"3 channels; .*needs 1. Load them as for training")


@GRID
def test_images_of_another_size_are_named(verb: str) -> None:
    why = r"of shape 3 × 10 × 10 reach the layer '1' as 256 numbers each; it needs 144. Give"
    refused(verb, convnet(), torch.rand(8, 3, 10, 10), why)


@pytest.mark.parametrize("verb", ["stream", "predict"])
def test_a_module_that_checks_its_images_itself_is_understood(verb: str) -> None:
    refused(verb, Wrapped().eval(), IMAGES.permute(0, 2, 3, 1), r"channels last; the layer 'stem' needs")
    with pytest.raises(AssertionError, match="image size"):  # says it as well as we could
        VERBS[verb](Wrapped().eval(), torch.rand(8, 3, 9, 9))


def test_an_error_of_the_network_itself_is_left_alone() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(5, 4, 3), nn.Flatten(), nn.Linear(64, 5))
    with pytest.raises(RuntimeError, match="expected input"):
        undrift.predict(net, IMAGES)


@pytest.mark.filterwarnings("ignore:Sequential has no feature masks")
@GRID
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_floats_are_converted_to_the_precision_of_the_network(verb: str, dtype: torch.dtype) -> None:
    found = []
    for images in (IMAGES.to(dtype), IMAGES.to(dtype).float()):
        torch.manual_seed(0)
        answer = VERBS[verb](convnet(), images)
        if verb.startswith("adapt"):
            answer = undrift.predict(answer.model, images, samples=2, generator=1)
        found.append(answer.results[0].scores.nll if verb == "evaluate" else answer.probs)
    assert found[0] == found[1] if verb == "evaluate" else torch.equal(*found)


def test_a_network_of_several_precisions_says_which_it_needs() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Conv2d(3, 4, 8), nn.Linear(4, 5).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.stem(x).flatten(1).double())

    refused("predict", Mixed(), IMAGES.double(), r"are torch.float64; .* needs torch.float32 at its layer 'stem'.*to\(")


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("verb", ["stream", "stream by tent", "stream by cotta", "predict", "predict, perturbed"])
def test_an_image_without_a_batch_is_named_with_its_own_shape(verb: str, channels: int) -> None:
    net = convnet(channels)
    with pytest.raises(undrift.DataError, match=rf"of shape \({channels}, 8, 8\).*make a batch of one.*image\[None\]"):
        VERBS[verb](net, IMAGES[0, :channels])


@pytest.mark.parametrize("method", ["undrift", "tent"])
@pytest.mark.parametrize("images", [IMAGES.permute(0, 2, 3, 1), IMAGES[:, :1], IMAGES[0]])
def test_a_stream_that_failed_gives_the_network_back_at_once(method: str, images: Tensor) -> None:
    net = convnet()
    gc.disable()  # a reference cycle would keep the stream until the collector runs
    try:
        try:
            for _ in undrift.stream(net, [images], method=method):
                pass
        except undrift.DataError:
            pass
        undrift.perturb(net)  # raises where something is left on it
    finally:
        gc.enable()


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = convnet()

    def forward(self, images: Tensor, mask: Tensor) -> Tensor:
        return self.net(images * mask)


class ByName(TwoInputs):
    def forward(self, *, pixel_values: Tensor) -> Tensor:  # type: ignore[override]
        return self.net(pixel_values)


@pytest.mark.parametrize("verb", ["adapt", "stream", "stream by cotta", "predict", "predict, perturbed", "evaluate"])
def test_a_network_of_other_inputs_is_named(verb: str) -> None:
    refused(
        verb, TwoInputs().eval(), IMAGES, r"TwoInputs\.forward\(images.*, mask.*\) .* cannot be .*needed: .*Wrap it"
    )
    refused(verb, ByName().eval(), IMAGES, r"ByName\.forward\(\*, pixel_values.* cannot be called with one tensor")
