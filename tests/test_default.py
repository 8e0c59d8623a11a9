"""The default must not hurt: a stream of low-contrast images through a real network, from the first batches on."""

from pathlib import Path

import pytest
import torch

import undrift
from undrift_bench import data, zoo

SHARED = Path(__file__).parents[2] / "shared" / "data" / "cifar10"


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.exists(), reason="needs ../shared/data/cifar10 beside the checkout")
def test_streaming_contrast_gains_twenty_points_over_the_source() -> None:
    domain = data.cifar10(SHARED).select(range(600))
    clean, labels = next(iter(domain.batches(600)))
    images = undrift.corrupt(clean, "contrast", 5)
    net = zoo.load("wrn40_2", SHARED / "wrn40_2.safetensors").eval()
    with torch.no_grad():
        source = (torch.cat([net(x).argmax(1) for x in images.split(200)]) == labels).double().mean()
    model = undrift.perturb(net, generator=torch.Generator().manual_seed(0))
    # One draw an answer: ten take ten times as long and are better still.
    answers = [p.label for p in undrift.stream(model, images.split(200), likelihood=undrift.entropy, answer="before")]
    adapted = (torch.cat(answers) == labels).double().mean()
    assert adapted > source + 0.20
