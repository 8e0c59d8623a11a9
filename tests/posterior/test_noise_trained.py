"""Weights that are trained under their noise get the gradient of the noisy pass, whatever layer they belong to."""

import pytest
import torch
from torch import Tensor, nn

import undrift


class Attention(nn.Module):
    """Attention of a sequence to itself, or to another of its own width."""

    def __init__(self, other: int | None = None) -> None:
        super().__init__()
        self.inside = nn.MultiheadAttention(4, 2, batch_first=True, kdim=other, vdim=other)
        self.other = other or 4

    def forward(self, x: Tensor) -> Tensor:
        seen = x[:, :, : self.other]
        return self.inside(x, seen, seen)[0]


class Standardised(nn.Conv2d):
    """A convolution with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv2d(x, self.weight - self.weight.mean((1, 2, 3), keepdim=True), self.bias)


NETS = {
    "attention": (lambda: Attention(), (2, 3, 4)),
    "attention to others": (lambda: Attention(3), (2, 3, 4)),
    "own forward": (lambda: nn.Sequential(Standardised(2, 3, 2), nn.Tanh()), (2, 2, 3, 3)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(2, 4, 2, groups=2), nn.Tanh()), (2, 2, 3, 3)),
    "transposed": (lambda: nn.Sequential(nn.ConvTranspose2d(2, 3, 2), nn.Tanh()), (2, 2, 3, 3)),
    "linear": (lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), (2, 4)),
}


@pytest.mark.parametrize("estimator", ["local", "drawn"])
@pytest.mark.parametrize("sharing", ["kernel", "weight"])
@pytest.mark.parametrize("name", NETS)
def test_gradients_are_the_slopes_of_the_noisy_loss(name: str, sharing: str, estimator: str) -> None:
    torch.manual_seed(0)
    make, size = NETS[name]
    x = torch.randn(size, dtype=torch.float64)
    how = {"conv_sharing": sharing, "linear_sharing": sharing, "estimator": estimator, "init_fraction": 0.2}
    model = undrift.perturb(make().double(), train="*", **how)

    def loss() -> Tensor:
        model.reseed(3)  # the same noise every time
        return model(x).square().sum()

    loss().backward()
    learned = dict(model.named_parameters())
    assert all(p.requires_grad for p in learned.values())
    step = 1e-5
    for what, parameter in learned.items():
        flat, slopes = parameter.data.view(-1), []
        for place in range(len(flat)):
            here = float(flat[place])
            around = []
            for there in (here + step, here - step):
                flat[place] = there
                with torch.no_grad():
                    around.append(float(loss()))
            flat[place] = here
            slopes.append((around[0] - around[1]) / (2 * step))
        found = torch.tensor(slopes, dtype=torch.float64).view_as(parameter)
        torch.testing.assert_close(parameter.grad, found, rtol=1e-4, atol=1e-5, msg=lambda m, what=what: f"{what}: {m}")


@pytest.mark.parametrize("name", ["attention", "own forward"])
def test_every_weight_moves_under_bayes_by_backprop(name: str) -> None:
    torch.manual_seed(0)
    make, size = NETS[name]
    net = nn.Sequential(make(), nn.Flatten(), nn.LazyLinear(3)).eval()
    net(torch.zeros(size))
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    going = undrift.stream(net, torch.randn(3, *size).unbind(), method="bbb")
    list(going)
    assert [n for n, p in going.model.net.named_parameters() if torch.equal(p, before[n])] == []


def test_frozen_weights_stay_frozen_in_a_layer_with_its_own_forward() -> None:
    model = undrift.perturb(Attention())
    model(torch.randn(2, 3, 4)).sum().backward()
    assert all(p.grad is None and not p.requires_grad for p in model.net.parameters())
