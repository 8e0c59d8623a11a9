"""Layers that share one weight share its perturbation, or are refused where its kernels are not the same in both."""

import pytest
import torch
from torch import Tensor, nn

import undrift
from undrift import CannotPerturb


class Tied(nn.Module):
    """Two layers with one weight: an autoencoder, say."""

    def __init__(self, enc: nn.Module, dec: nn.Module) -> None:
        super().__init__()
        self.enc, self.dec = enc, dec
        dec.weight = enc.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.dec(self.enc(x)).flatten(1)


CROSSWISE = {
    "unequal numbers": lambda: Tied(nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 3, 3)),
    "equal numbers": lambda: Tied(nn.Conv2d(4, 4, 3), nn.ConvTranspose2d(4, 4, 3)),
    "transposed first": lambda: Tied(nn.ConvTranspose1d(4, 4, 3), nn.Conv1d(4, 4, 3)),
    "groups of transposed ones": lambda: Tied(nn.ConvTranspose2d(4, 4, 3), nn.ConvTranspose2d(4, 8, 3, groups=2)),
}


@pytest.mark.parametrize("estimator", ["local", "drawn"])
@pytest.mark.parametrize("name", CROSSWISE)
def test_a_variance_a_kernel_cannot_serve_other_kernels(name: str, estimator: str) -> None:
    net = CROSSWISE[name]()
    why = r"dec \(\w+, \d kernels\) shares its weight with enc .* one variance per kernel cannot serve both"
    with pytest.raises(CannotPerturb, match=why) as raised:
        undrift.perturb(net, estimator=estimator)
    assert "exclude='dec'" in str(raised.value)
    assert all(p.requires_grad for p in net.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    assert len(undrift.perturb(net, estimator=estimator, exclude="dec").noise) == 1


@pytest.mark.parametrize("estimator", ["local", "drawn"])
def test_a_variance_a_weight_serves_both(estimator: str) -> None:
    torch.manual_seed(0)
    net, x = Tied(nn.Conv2d(2, 3, 2, bias=False), nn.ConvTranspose2d(3, 2, 2, bias=False)), torch.rand(2, 2, 3, 3)
    model = undrift.perturb(net, conv_sharing="weight", estimator=estimator, first_energy="square", init_fraction=0.3)
    model(x).square().sum().backward()
    noise = model.noise["enc"]
    assert list(model.noise) == ["enc"]
    assert noise.log_var.grad.abs().min() > 0
    hidden = net.enc.forward(x)
    expected = nn.functional.conv_transpose2d(hidden**2, noise.log_var.detach().exp())
    torch.testing.assert_close(noise.variance(net.dec, hidden, net.dec.forward(hidden).shape).detach(), expected)


@pytest.mark.parametrize(
    "net",
    [
        Tied(nn.Conv2d(3, 3, 3, groups=3), nn.ConvTranspose2d(3, 3, 3, groups=3)),  # a kernel a channel, either way
        Tied(nn.ConvTranspose2d(4, 4, 3), nn.ConvTranspose2d(4, 4, 3, stride=2)),
        Tied(nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3, groups=2)),  # rows of the weight, whatever they look at
    ],
)
def test_layers_with_the_same_kernels_share_one_perturbation(net: Tied) -> None:
    model = undrift.perturb(net)
    x = torch.rand(2, net.enc.in_channels, 6, 6)
    model(x).sum().backward()
    assert list(model.noise) == ["enc"]
    assert model.noise["enc"].log_var.grad.abs().min() > 0


def test_two_parameters_on_one_storage_are_two() -> None:
    """As PyTorch's optimisers and state dicts see them."""
    conv, linear = nn.Conv2d(3, 8, 1), nn.Linear(3, 8)
    linear.weight = nn.Parameter(conv.weight.data.view(8, 3))
    model = undrift.perturb(nn.ModuleDict({"conv": conv, "linear": linear}))
    assert list(model.noise) == ["conv", "linear"]
