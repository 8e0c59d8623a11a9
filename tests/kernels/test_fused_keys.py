"""Triton's kernel for a step's keys against its definition: on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1).

Keys are integers: they are the same, or noise is other noise.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import undrift
from fused_support import numpys, triton
from support import convnet, images
from undrift.kernels import dispatch
from undrift.kernels.triton import launch
from undrift.posterior.seeds import keys_of

ENDS = (0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Return the GPU where there is one, else a CPU for Triton's interpreter."""
    monkeypatch.setattr(launch, "_keys", {})
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def states(device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield seeds and steps, the largest and smallest among them."""
    for seed in ENDS:
        for step in (*ENDS, 7, 2**44 - 1):
            yield torch.tensor(seed, device=device), torch.tensor(step, device=device)


@triton
@numpys
@pytest.mark.parametrize("count", [2, 54, 128, 300])
def test_the_keys_of_a_step_bit_for_bit(device: torch.device, count: int) -> None:
    for seed, step in states(device):
        assert torch.equal(launch.keys(seed, step, count), keys_of(seed, step, count))


@triton
@numpys
def test_a_network_asks_the_kernel_where_it_may(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model = undrift.perturb(convnet(), generator=torch.Generator().manual_seed(3)).to(device)
    x = images(4).to(device)
    with torch.no_grad(), dispatch.force("plain"):
        want = model(x), model.key.current
    asked: list[int] = []
    kernel = launch.keys
    monkeypatch.setattr(launch, "keys", lambda *args: asked.append(args[2]) or kernel(*args))
    monkeypatch.setattr("undrift.posterior.seeds.dispatch.quick", lambda *_tensors: True)
    model.reseed(torch.Generator().manual_seed(3))
    with torch.no_grad():
        got = model(x), model.key.current
    assert asked == [2 * len(model.noises())]
    assert torch.equal(got[1], want[1])
    torch.testing.assert_close(got[0], want[0], rtol=1e-3, atol=1e-3)
