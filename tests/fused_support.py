"""Shapes and arguments that the tests of the fused noise share."""

import pytest
import torch
from torch import Tensor

from undrift.fused import plain

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
    plane = plain.square_sum(torch.relu(torch.randn(shape, dtype=dtype)), groups, last)
    plane[0].flatten()[0] = 0
    log_var = torch.randn(shape[-1] if last else shape[1], dtype=torch.promote_types(dtype, torch.float32))
    return y, plane, log_var, torch.randn(shape, dtype=dtype)
