"""The demo's sizes and seeds, its two domains, and its source network."""

from dataclasses import dataclass
from importlib.resources import as_file, files

from torch import nn

from undrift.images import TensorDomain, split
from undrift.images.corrupt import corrupt
from undrift_bench import data, zoo

WEIGHTS = "digits.safetensors"
HELD_OUT = 0.2
"""Share of MNIST that the source network has never seen: where forgetting is measured."""


@dataclass(frozen=True)
class DemoSetting:
    """The demo's sizes and seeds. Methods run with the library's values, so there is no rate here.

    Attributes:
        seeds: runs of each row, each with its own order of images and its own noise.
        epochs: passes over the target, in place of the methods' own; None for those.
        answer_batch_size: images per forward pass of an answer.
        target_images: how many of the 1,797 images of the target are used.
        held_out_images: how many of the 1,000 held-out source images measure what is forgotten.
        corruptions: the domains of the stream, in order; clean images come last.
        severity: of all of them.
        stream_images: how many held-out images pass by under each corruption.
        stream_batch_size: images that arrive at once.
    """

    seeds: int = 3
    epochs: int | None = None
    answer_batch_size: int = 64
    target_images: int | None = 1000
    held_out_images: int | None = 512
    corruptions: tuple[str, ...] = ("gaussian_noise", "contrast", "brightness", "impulse_noise")
    severity: int = 5
    stream_images: int = 256
    stream_batch_size: int = 64


QUICK = DemoSetting(
    seeds=2,
    epochs=1,
    target_images=128,
    held_out_images=96,
    corruptions=("gaussian_noise", "contrast"),
    stream_images=48,
    stream_batch_size=24,
)
"""Seconds, for a test: everything runs, nothing is learned."""


@dataclass(frozen=True)
class World:
    """The source network and the labelled images that it is tried on; labels are for scores only.

    Attributes:
        net: trained on the other 80 % of MNIST.
        size: of its file, in bytes.
        held_out: MNIST digits that it has not seen.
        target: scikit-learn's scans.
    """

    net: nn.Module
    size: int
    held_out: TensorDomain
    target: TensorDomain


def load_world(setting: DemoSetting) -> World:
    """Return the network that comes with the demo and its two domains; nothing is downloaded or trained."""
    _, held_out = source_images()
    target = data.digits("optdigits")
    with as_file(files("undrift_bench.demo") / WEIGHTS) as path:
        net, size = zoo.load("digits", path), path.stat().st_size
    return World(net, size, _first(held_out, setting.held_out_images), _first(target, setting.target_images))


def source_images() -> tuple[TensorDomain, TensorDomain]:
    """Return MNIST's digits: those that the network was trained on, and those held out."""
    return split(data.digits("mnist"), HELD_OUT, seed=0)


def stream_domains(setting: DemoSetting, world: World) -> dict[str, TensorDomain]:
    """Return the domains of the stream by name: the same held-out images under each corruption, clean ones last."""
    passing = _first(world.held_out, setting.stream_images)
    domains = {name: _corrupted(passing, name, setting.severity) for name in setting.corruptions}
    return domains | {"clean": passing}


def _corrupted(domain: TensorDomain, name: str, severity: int) -> TensorDomain:
    # Corruptions are of colour images; the channels of a grey one stay so close that one of them is enough.
    coloured = corrupt(domain.images.expand(-1, 3, -1, -1), name, severity)
    return TensorDomain(name, coloured[:, :1].contiguous(), domain.labels, domain.class_names, domain.preprocess)


def _first(domain: TensorDomain, count: int | None) -> TensorDomain:
    return domain if count is None else domain.select(range(min(count, len(domain))))
