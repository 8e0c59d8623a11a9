"""Mean squared error against clean on CIFAR-10 test images: the check values of a published-style generator."""

import importlib.util
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from undrift.images.corrupt import CORRUPTIONS, DEVELOPMENT, corrupt

SHEET = Path(__file__).parents[3] / "shared" / "data" / "cifar10" / "test.webp"
NOT_MONOTONE = {"elastic_transform", "glass_blur", "frost", "snow", "saturate"}
SEVERITY_5 = dict(
    zip(
        CORRUPTIONS,
        (
            *(0.0093, 0.0087, 0.0219, 0.0031, 0.0137, 0.0086, 0.0103, 0.0485),
            *(0.0381, 0.0348, 0.0550, 0.0318, 0.0079, 0.0032, 0.0019),
        ),
        strict=True,
    )
)


@pytest.fixture(scope="module")
def images() -> Tensor:
    """The first 2,000 test images."""
    image = pytest.importorskip("PIL.Image")
    if not SHEET.is_file():
        pytest.skip(f"the CIFAR-10 test images are not at {SHEET}")
    with image.open(SHEET) as file:
        rows = np.asarray(file.convert("RGB").crop((0, 0, 3200, 640)))
    tiles = rows.reshape(20, 32, 100, 32, 3).swapaxes(1, 2).reshape(-1, 32, 32, 3)
    return torch.from_numpy(tiles).permute(0, 3, 1, 2).contiguous()


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_mean_squared_error_is_the_published_one(name: str, images: Tensor) -> None:
    if name == "frost" and importlib.util.find_spec("imagecorruptions") is None:
        pytest.skip("the frost pictures come with the wheel imagecorruptions, which is not installed")
    error = ((corrupt(images, name, 5).float() - images.float()) / 255).square().mean().item()
    tolerance = 0.10 if name in ("frost", "snow", "glass_blur") else 0.05
    assert error == pytest.approx(SEVERITY_5[name], rel=tolerance)


@pytest.mark.parametrize("name", sorted({*CORRUPTIONS, *DEVELOPMENT} - NOT_MONOTONE))
def test_error_rises_with_severity(name: str, images: Tensor) -> None:
    clean = images[:200]
    errors = [
        (corrupt(clean, name, severity).float() - clean.float()).square().mean().item() for severity in range(1, 6)
    ]
    # Equal: motion blur's severities 3 and 4 differ in a radius that lies beyond the reach of σ
    assert all(after >= before for before, after in pairwise(errors))
