"""Small trees in the published layouts, and the real data where they lie beside the repository."""

import io
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def shared() -> Path:
    """The real data."""
    place = Path(__file__).resolve().parents[3] / "shared" / "data"
    if not place.is_dir():
        pytest.skip("../shared/data, with the real images, is not there")
    return place


def encoded(seed: int, size: tuple[int, int] = (12, 10), kind: str = "PNG") -> bytes:
    """An image of noise, height × width."""
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


@pytest.fixture
def picture() -> Callable[..., bytes]:
    """Makes encoded images."""
    return encoded


@pytest.fixture
def plant() -> Callable[..., Path]:
    """Writes a tree with a folder a class and `count` images in each, all different."""

    def plant(root: Path, classes: Iterable[str], count: int = 1, ending: str = "png") -> Path:
        seed = 0
        for name in classes:
            (root / name).mkdir(parents=True)
            for index in range(count):
                (root / name / f"{index}.{ending}").write_bytes(encoded(seed))
                seed += 1
        return root

    return plant
