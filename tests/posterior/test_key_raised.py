"""What a forward pass that raised leaves behind: no keys for anybody."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import undrift


class Failing(nn.Module):
    """Two layers, the second in a checkpoint where it is asked for; between them a pass may raise."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.bad, self.again = False, False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x))
        if self.bad:
            raise ValueError("bad")
        return checkpoint(self.b, x, use_reentrant=True) if self.again else self.b(x)


def failing() -> tuple[undrift.Perturbed, Tensor]:
    torch.manual_seed(0)
    model, x = undrift.perturb(Failing(), linear_sharing="kernel", init_fraction=0.5), torch.rand(4, 6)
    model(x)
    model.reseed(1)
    return model, x


@pytest.mark.parametrize("root", ["model", "net"])
def test_a_pass_that_raised_leaves_its_keys_to_nobody(root: str) -> None:
    """Neither to a checkpoint that runs a layer of an earlier pass again, nor to a layer that is called alone."""
    found = []
    for fail in (False, True):
        model, x = failing()
        call = model if root == "model" else model.net
        model.net.again = True
        out = call(x)
        if fail:
            model.net.bad = True
            with pytest.raises(ValueError, match="bad"):
                call(x)
        out.square().sum().backward()
        found.append([noise.log_var.grad for noise in model.noises()])
    assert all(torch.equal(mine, others) for mine, others in zip(*found, strict=True))


@pytest.mark.parametrize("given", [{"samples": 0}, {"samples": 2, "generator": 0}])
def test_noise_is_put_back_behind_a_pass_that_raised(given: dict[str, Any]) -> None:
    model, x = failing()
    want = model.net.b(x)
    model.reseed(1)
    model.net.bad = True
    with pytest.raises(ValueError, match="bad"):
        undrift.predict(model, x, **given)
    assert torch.equal(model.net.b(x), want)
