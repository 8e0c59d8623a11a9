"""A domain that a tiny network learns in a blink: four kinds of bright bars in noise."""

import pytest
import torch

from undrift.images import Preprocess, TensorDomain
from undrift_bench.train import TrainOptions, train_preset

NAMES = ("left", "right", "top", "bottom")


def bars(count: int = 120, seed: int = 0) -> TensorDomain:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 90, (count, 1, 12, 12), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, 4, (count,), generator=generator)
    for image, label in zip(images[:, 0], labels.tolist(), strict=True):
        bar = (image[:, :3], image[:, -3:], image[:3], image[-3:])[label]
        bar += 150
    return TensorDomain("bars", images, labels, NAMES, Preprocess(mean=(0.0,), std=(1.0,)))


@pytest.fixture
def domain() -> TensorDomain:
    return bars()


@pytest.fixture
def quick() -> TrainOptions:
    return train_preset("digits").replace(epochs=4, batch_size=20, held_out=0.2, pad=1, checkpoint_seconds=0.0)
