"""Triton's kernel for a step's keys against its definition: on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1).

Keys are integers: they are the same, or noise is other noise.
"""

import pytest
import torch

from fused_support import numpys, triton
from undrift.kernels.epsilon import keys_of
from undrift.kernels.triton import launch

ENDS = (0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF)


@triton
@numpys
@pytest.mark.parametrize("count", [2, 54, 300])
def test_the_keys_of_a_step_bit_for_bit(count: int) -> None:
    """Seeds and steps, the largest and smallest among them."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for seed in ENDS:
        for step in (*ENDS, 7, 2**44 - 1):
            state = torch.tensor(seed, device=device), torch.tensor(step, device=device)
            assert torch.equal(launch.keys(*state, count), keys_of(*state, count))
