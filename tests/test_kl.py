"""The KL in closed form is what it is defined as: the mean of log q − log p over weights drawn from q."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributions as D
from torch import nn

import undrift

DRAWS = 2000


def normals(model: undrift.Perturbed, source: dict[str, torch.Tensor]) -> list[tuple[D.Normal, D.Normal]]:
    """Return q and p of each perturbed weight, built from the network's own state and nothing else."""
    found = []
    for name, noise in model.noise.items():
        weight, before = model.net.get_submodule(name).weight.detach(), source[f"{name}.weight"]

        def full(values: torch.Tensor, like: torch.Tensor = weight) -> torch.Tensor:
            return values.detach().view(-1, *[1] * (like.ndim - 1)) if values.ndim == 1 else values.detach()

        q = D.Normal(weight, full(noise.log_var).exp().sqrt().expand_as(weight))
        found.append((q, D.Normal(before, full(noise.prior_var).sqrt().expand_as(weight))))
    return found


@pytest.mark.parametrize("trained", [False, True], ids=["zero mean", "shifted mean"])
@settings(max_examples=6)
@given(
    seed=st.integers(0, 2**31),
    sharing=st.sampled_from(["kernel", "weight"]),
    scale=st.sampled_from([0.3, 1.0, 4.0]),
)
def test_the_kl_is_its_monte_carlo_estimate(trained: bool, seed: int, sharing: str, scale: float) -> None:
    """Within five standard errors of the estimate: less than one wrong alarm in a million draws of this test."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(16, 3)).double()
    source = {name: value.clone() for name, value in net.state_dict().items()}
    options = {"conv_sharing": sharing, "linear_sharing": sharing, "prior_scale": scale, "init_fraction": 0.3}
    model = undrift.perturb(net, train="*" if trained else (), **options)
    with torch.no_grad():
        for noise in model.noises():
            noise.log_var += 0.5 * torch.randn_like(noise.log_var)
        if trained:
            for name in model.noise:
                weight = model.net.get_submodule(name).weight
                weight += 0.3 * torch.randn_like(weight)
    values = torch.zeros(DRAWS, dtype=torch.float64)
    for q, p in normals(model, source):
        w = q.sample((DRAWS,))
        values += (q.log_prob(w) - p.log_prob(w)).flatten(1).sum(1)
    error = float(values.std()) / math.sqrt(DRAWS)
    closed = float(undrift.kl(model, "sum").detach())
    assert abs(closed - float(values.mean())) < 5 * error
    assert 5 * error < 0.2 * closed  # the estimate says something
    count = sum(weight.numel() for name, weight in source.items() if name.endswith("weight"))
    assert float(undrift.kl(model).detach()) == pytest.approx(closed / count)
