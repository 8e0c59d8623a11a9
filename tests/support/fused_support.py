"""Shapes and arguments that the tests of the fused noise share."""

import importlib.util
from importlib.metadata import version
from typing import Any

import numpy as np
import pytest
import torch
from numpy.lib import NumpyVersion
from torch import Tensor

from undrift.kernels import reference
from undrift.kernels.triton import launch, layer, tiles, windows


def _cannot(interpreted: bool) -> str:
    """Return why Triton's kernels cannot run here, or ""."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if interpreted and NumpyVersion(np.__version__) >= "2.4.0" and NumpyVersion(version("triton")) < "3.7.0":
        return "the interpreter of Triton before 3.7 needs numpy before 2.4"
    return ""


_WHY, _WHY_INTERPRETED = _cannot(not torch.cuda.is_available()), _cannot(True)
triton = pytest.mark.skipif(bool(_WHY), reason=_WHY)
interpreter = pytest.mark.skipif(bool(_WHY_INTERPRETED), reason=_WHY_INTERPRETED)
# Triton's interpreter, of numpy.
numpys = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

KEY = torch.tensor(-987654321987654321)
# shape, groups, channels last
SHAPES = {
    "conv": ((3, 6, 5, 7), 1, False),
    "grouped 1d": ((2, 12, 9), 3, False),
    "depthwise 3d": ((2, 4, 3, 2, 3), 4, False),
    "one channel": ((2, 1, 3, 3), 1, False),
    "linear": ((5, 33), 1, True),
    "tokens": ((2, 7, 10), 1, True),
    "many pieces": ((3, 40, 50, 50), 2, False),
    "many rows": ((9, 200, 60), 1, True),
}
shapes = pytest.mark.parametrize(("shape", "groups", "last"), SHAPES.values(), ids=SHAPES)


def arguments(
    shape: tuple[int, ...], groups: int, last: bool, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    """Return y, a plane with zeros in it, log-variances, and a gradient."""
    torch.manual_seed(0)
    y = torch.randn(shape, dtype=dtype)
    plane = reference.square_sum(torch.relu(torch.randn(shape, dtype=dtype)), groups, last)
    plane[0].flatten()[0] = 0
    log_var = torch.randn(shape[-1] if last else shape[1], dtype=torch.promote_types(dtype, torch.float32))
    return y, plane, log_var, torch.randn(shape, dtype=dtype)


# What tensors of a test's size are cut into, by module and name.
FEW = [(tiles, "processors", lambda _index: 1), (windows, "PLANE", {"PLANE": 16})]
SIZES: dict[str, list[tuple[Any, str, Any]]] = {
    "many programs": [],
    "small sums": [*FEW, (windows, "PARTS", {"ROWS": 2, "COLUMNS": 4}), (tiles, "_PROGRAMS", 2)],
    "one program": [
        *FEW,
        *((tiles, "_PROGRAMS", 1), (tiles, "_TILE", 64), (tiles, "VECTOR", 16)),
        *((launch, "ADDING", tiles.Cut(64, 4, {64: 1})), (launch, "SUMMING", tiles.Cut(64, 1, {64: 1}))),
        *((windows, "WINDOWED", tiles.Cut(64, 4, {64: 1})), (windows, "VECTORS", tiles.Cut(32, 4, {8: 1}))),
    ],
}


def kernels_device(monkeypatch: pytest.MonkeyPatch, how: str = "many programs") -> torch.device:
    """Return the GPU where there is one, else a CPU for Triton's interpreter.

    With "one program" all loops over positions and channels loop; with "small sums" those over parts of them do.
    """
    for remembered in (launch.sums_of, launch.noises_of, layer._forward_plan, layer._backward_plan):
        remembered.cache_clear()
    for module, name, value in SIZES[how]:
        monkeypatch.setattr(module, name, value)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def in_orders(y: Tensor) -> list[Tensor]:
    """Return a tensor in each memory order that its kind has."""
    order = {4: torch.channels_last, 5: torch.channels_last_3d}.get(y.ndim)
    return [y] if order is None else [y, y.to(memory_format=order)]
