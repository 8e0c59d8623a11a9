"""Trees of random images as PACS and Office have them, and a tiny network that looks at them."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import nn

from undrift_bench.bench import Request
from undrift_bench.bench.offline.sets import DataSet
from undrift_bench.bench.offline.sources import Setup, setup
from undrift_bench.bench.offline.tiny import TINY, TinyShot


class Silent:
    """A progress bar that nobody sees."""

    def advance(self, *_: object, **__: object) -> None:
        """Move on."""

    def say(self, *_: object) -> None:
        """Change the words."""


def plant(root: Path, classes: tuple[str, ...], count: int, shade: int) -> None:
    """Write `count` images of noise a class, as a benchmark's tree has them."""
    generator = np.random.default_rng(shade)
    for name in classes:
        (root / name).mkdir(parents=True)
        for index in range(count):
            pixels = generator.integers(0, 128, (22, 26, 3), dtype=np.uint8) + np.uint8(shade)
            buffer = io.BytesIO()
            Image.fromarray(pixels).save(buffer, "PNG")
            (root / name / f"{index}.png").write_bytes(buffer.getvalue())


def small(dataset: DataSet, request: Request) -> Setup:
    """The real folders, seen by a tiny network."""
    real = setup(dataset, request)
    options = real.options.replace(epochs=1, batch_size=8)
    return replace(real, network="tiny", options=options, preprocess=TINY, make=TinyShot, epochs=1)


def masks_in(net: nn.Module) -> Any:
    """Return the feature masks that were put on a network, or None."""
    return next((module for module in net.modules() if type(module).__name__ == "Masks"), None)
