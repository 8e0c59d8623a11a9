"""Adaptation pays: digits that a network was not trained on are read far better afterwards, by each way to adapt it."""

import copy
from importlib.resources import as_file, files

import pytest
import torch
from torch import Tensor, nn

import undrift
from undrift.images import TensorDomain
from undrift_bench import data, zoo
from undrift_bench.data.scenes import scenes
from undrift_bench.zoo.unet import UNet

POINTS = 0.1  # of accuracy; five standard errors of 900 images' are 0.08


@pytest.fixture(scope="module")
def digits() -> tuple[nn.Module, TensorDomain, float]:
    """Return a network trained on MNIST, scikit-learn's scans, and how many of them it reads right: two thirds."""
    target = data.digits("optdigits").select(range(900))
    with as_file(files("undrift_bench.demo") / "digits.safetensors") as path:
        net = zoo.load("digits", path)
    return net, target, accuracy(undrift.predict(net, target.batches(256)), target)


def accuracy(answers: undrift.Prediction, domain: TensorDomain) -> float:
    labels: Tensor = domain.labels
    return float((answers.label == labels).float().mean())


def shuffled(domain: TensorDomain) -> TensorDomain:
    return domain.select(torch.randperm(len(domain), generator=torch.Generator().manual_seed(0)).tolist())


def test_the_source_network_reads_two_thirds(digits: tuple[nn.Module, TensorDomain, float]) -> None:
    assert 0.55 < digits[2] < 0.75  # else nothing is left to gain, or the wrong network came along


def test_no_stream_takes_the_mirror_image_of_a_digit_for_a_view(digits: tuple[nn.Module, TensorDomain, float]) -> None:
    net, target, _ = digits
    batches = [images for images, *_ in target.batches(100)]
    stream = undrift.stream(copy.deepcopy(net), batches[:2], method="norm-stats", answer_views="auto")
    assert [stream.online.views.names for _ in stream] == [("shift",), ("shift",)]


def test_adapt_beats_the_source(digits: tuple[nn.Module, TensorDomain, float]) -> None:
    net, target, before = digits
    torch.manual_seed(0)
    history = undrift.adapt(
        copy.deepcopy(net),
        target,
        method="vmp-shot",
        epochs=2,
        generator=torch.Generator().manual_seed(0),
        progress=False,
        adapt_lr=0.02,
    )
    answers = undrift.predict(history.model, target.batches(256), samples=5, generator=0)
    assert accuracy(answers, target) > before + POINTS
    assert "no sign of collapse" in str(history.verdict)
    with history.model.off() as source:
        assert accuracy(undrift.predict(source, target.batches(256)), target) == before


@pytest.mark.parametrize("method", ["vmp", "tent"])
def test_a_stream_beats_the_source(digits: tuple[nn.Module, TensorDomain, float], method: str) -> None:
    net, target, before = digits
    torch.manual_seed(0)
    passing = shuffled(target)
    answers = undrift.stream(copy.deepcopy(net), passing.batches(64), method=method)
    assert accuracy(undrift.Prediction.cat(answers), passing) > before + POINTS


@pytest.mark.slow
def test_the_default_segments_foggy_scenes_better_than_the_source() -> None:
    torch.manual_seed(0)
    net = UNet(2, (8, 16))  # ink or background
    images, labels = scenes("train", 256)
    optimiser = torch.optim.Adam(net.parameters(), 5e-3)
    for _ in range(4):
        for x, y in zip(images.split(16), labels.split(16), strict=True):
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(x / 255), (y > 0).long()).backward()
            optimiser.step()
    net.eval()
    images, labels = scenes("test", 64)
    foggy = undrift.corrupt(images, "fog", 5) / 255
    labelled = [(foggy, (labels > 0).long())]
    before = undrift.evaluate(net, labelled).results[0].scores.miou
    order = torch.Generator().manual_seed(0)
    model = undrift.adapt(net, foggy, epochs=2, generator=order).model
    assert model is not None
    after = undrift.evaluate(model, labelled, samples=2, generator=0).results[0].scores.miou
    assert before is not None
    assert after is not None
    assert after > before + POINTS
