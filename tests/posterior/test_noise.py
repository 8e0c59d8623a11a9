"""The noise of a layer: exact variance, equal estimators, and behaviour at the edges."""

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

import undrift
from faults import one_of_processes
from support import convnet, images, layers_with_input


def noise_of(layer: nn.Module, sharing: str = "kernel", energy: str = "square", **options: object) -> Any:
    """Return the noise of a copy of the layer, alone in a network."""
    shared = {"conv_sharing": sharing, "linear_sharing": sharing, "first_energy": energy}
    return undrift.perturb(nn.Sequential(copy.deepcopy(layer)), **shared, **options).noise["0"]


def by_kernel(layer: nn.Module, weight: Tensor) -> Tensor:
    """Return a view of a weight: groups × kernels of a group × the weights of a kernel."""
    grouped = weight.unflatten(0, (getattr(layer, "groups", 1), -1))
    return grouped.transpose(1, 2) if "Transpose" in type(layer).__name__ else grouped


def energies(layer: nn.Module, x: Tensor, energy: str, offset: float = 0.01) -> list[float]:
    """Return the variance of each output over σ²: the energy of what the layer sees there."""
    noise = noise_of(layer, energy=energy, energy_offset=offset)
    found: list[float] = (noise.variance(layer, x, layer(x).shape) / noise.log_var.exp()).flatten().tolist()
    return found


@settings(max_examples=120)
@given(drawn=layers_with_input())
def test_box_filter_is_the_second_convolution(drawn: tuple[nn.Module, Tensor]) -> None:
    layer, x = drawn
    shape = layer(x).shape
    shared, full = noise_of(layer), noise_of(layer, "weight")
    with torch.no_grad():
        shared.log_var += torch.randn_like(shared.log_var)
        weights = by_kernel(layer, full.log_var)
        weights.copy_(shared.log_var.view(*weights.shape[:2], *(1,) * (weights.ndim - 2)))
    x_box, x_full = x.clone().requires_grad_(), x.clone().requires_grad_()
    box, second = shared.variance(layer, x_box, shape), full.variance(layer, x_full, shape)
    box, second = box.expand(shape), second.expand(shape)
    pull = torch.randn(shape, dtype=torch.float64)
    (box * pull).sum().backward()
    (second * pull).sum().backward()
    torch.testing.assert_close(box, second, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(x_box.grad, x_full.grad, rtol=1e-10, atol=1e-10)
    summed = by_kernel(layer, full.log_var.grad).flatten(2).sum(2).flatten()
    torch.testing.assert_close(shared.log_var.grad, summed, rtol=1e-10, atol=1e-10)


LAYERS = {
    "conv": (nn.Conv2d(4, 6, 3, padding=1, stride=2, groups=2), torch.Size((2, 4, 6, 6))),
    "depthwise": (nn.Conv1d(4, 4, 3, dilation=2, groups=4, padding_mode="circular", padding=2), torch.Size((2, 4, 7))),
    "transposed": (nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, groups=2), torch.Size((2, 4, 3, 3))),
    "linear": (nn.Linear(7, 5), torch.Size((3, 7))),
}


@pytest.mark.parametrize("sharing", ["kernel", "weight"])
@pytest.mark.parametrize("name", LAYERS)
def test_estimators_agree_in_mean_and_variance(name: str, sharing: str) -> None:
    """Each z-score below is a test at 5 σ; with under 300 outputs × 4, one false alarm in a thousand such runs."""
    layer, size = LAYERS[name]
    x = torch.randn(size)
    options = {"conv_sharing": sharing, "linear_sharing": sharing, "first_energy": "square", "init_fraction": 0.5}
    with torch.no_grad():
        mean = layer(x)
        model = undrift.perturb(nn.Sequential(layer), estimator="local", **options)
        variance = model.noise["0"].variance(layer, x, mean.shape).expand_as(mean)
        # Rows are independent: one batch of many copies is many draws.
        local = model(x.repeat(2000, *(1,) * (x.ndim - 1))).unflatten(0, (2000, -1))
        model.remove()
        model = undrift.perturb(nn.Sequential(layer), estimator="drawn", **options)
        drawn = torch.stack([model(x) for _ in range(600)])
        model.remove()
    silent = variance == 0  # a transposed convolution's outer rim
    for outputs in (local, drawn):
        draws = len(outputs)
        z_mean = (outputs.double().mean(0) - mean) / (variance / draws).sqrt()
        z_variance = (outputs.double().var(0) / variance - 1) / math.sqrt(2 / (draws - 1))
        assert z_mean[~silent].abs().max() < 5
        assert z_variance[~silent].abs().max() < 5
        assert torch.equal(outputs[:, silent], mean[silent].expand(draws, -1))


def test_local_noise_is_independent_where_drawn_noise_is_not() -> None:
    layer, x = nn.Conv2d(1, 1, 1), torch.ones(1, 1, 1, 2)
    correlations = {}
    for estimator in ("local", "drawn"):
        model = undrift.perturb(nn.Sequential(layer), estimator=estimator, first_energy="square")
        with torch.no_grad():
            outputs = torch.stack([model(x).flatten() for _ in range(2000)])
        correlations[estimator] = float(torch.corrcoef(outputs.T)[0, 1])
        model.remove()
    assert abs(correlations["local"]) < 5 / math.sqrt(2000)
    assert correlations["drawn"] > 0.999


def test_a_process_draws_the_rows_of_its_share_of_the_batch() -> None:
    """What the second of two processes draws for its half is what one process draws there for the whole."""
    model, x = undrift.perturb(convnet(), norm_statistics="source"), images(6)
    model.reseed(1)
    whole = model(x)
    model.reseed(1)
    with one_of_processes(1):
        torch.testing.assert_close(model(x[3:]), whole[3:])


def test_zero_variance_gives_the_source_bit_for_bit() -> None:
    net, x = convnet().eval(), images()
    expected = net(x)
    for estimator in ("local", "drawn"):
        model = undrift.perturb(net, estimator=estimator, init_fraction=0.0, norm_statistics="source")
        assert torch.equal(model(x), expected)
        model.remove()


@pytest.mark.parametrize("estimator", ["local", "drawn"])
def test_zero_input_and_padding_give_finite_gradients(estimator: str) -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=2), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=2), nn.Flatten(), nn.Linear(400, 2)
    )
    with torch.no_grad():
        net[0].bias.fill_(-1)  # ReLU makes all-zero windows
    model = undrift.perturb(net, estimator=estimator, first_energy="square")
    x = torch.zeros(2, 3, 6, 6, requires_grad=True)
    model(x).square().sum().backward()
    assert torch.isfinite(x.grad).all()
    for noise in model.noise.values():
        assert torch.isfinite(noise.log_var.grad).all()


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), self.layer(x)


def test_a_layer_used_twice() -> None:
    x = torch.randn(3, 4)
    model = undrift.perturb(Twice(), estimator="local")
    a, b = model(x)
    assert not torch.equal(a, b)
    (a.sum() + b.sum()).backward()
    assert model.noise["layer"].log_var.grad.abs().sum() > 0
    assert len(model.noise) == 1
    model.remove()
    a, b = undrift.perturb(Twice(), estimator="drawn")(x)
    assert torch.equal(a, b)


@pytest.mark.slow
def test_uses_of_a_layer_are_uncorrelated() -> None:
    model, x = undrift.perturb(Twice(), init_fraction=1.0), torch.ones(1, 4)
    source = model.net.layer.weight.detach() @ x[0] + model.net.layer.bias.detach()
    with torch.no_grad():
        pairs = torch.stack([torch.stack([out[0] - source for out in model(x)]) for _ in range(2000)])
    for unit in range(4):
        assert abs(float(torch.corrcoef(pairs[:, :, unit].T)[0, 1])) < 5 / math.sqrt(2000)


def test_tied_weights_share_one_perturbation() -> None:
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    b.weight = a.weight
    model = undrift.perturb(nn.Sequential(a, b), estimator="drawn")
    assert len(model.noise) == 1
    assert "shares its weight" in repr(model)


def test_keyword_and_unbatched_calls() -> None:
    class ByKeyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.up = nn.Conv2d(3, 4, 3, padding=1), nn.ConvTranspose2d(4, 4, 3, stride=2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(input=x)
            return self.up(y, output_size=[2 * s + 2 for s in y.shape[-2:]])

    for estimator in ("local", "drawn"):
        net = ByKeyword()
        expected = net(images())
        model = undrift.perturb(net, estimator=estimator)
        assert model(images()).shape == expected.shape
        assert not torch.equal(model(images()), expected)
        assert model(images()[0]).shape == expected.shape[1:]
        assert not torch.equal(model(images()[0]), net(images()[0]))
    single = undrift.perturb(nn.Linear(3, 2))
    assert single(torch.ones(3)).shape == (2,)


def test_energy_of_the_input() -> None:
    conv, linear = nn.Conv2d(1, 1, 1), nn.Linear(2, 1)
    x = torch.tensor([[[[1.0, 3.0]]]])
    assert energies(conv, x, "square") == pytest.approx([1, 9])
    assert energies(conv, x, "offset", 0.5) == pytest.approx([1.5, 9.5])
    assert energies(conv, x, "centred") == pytest.approx([1, 1])
    assert energies(linear, x[0, 0], "centred") == pytest.approx([1 + 9])  # no positions to average over
    assert energies(linear, torch.tensor([[[1.0, 0.0], [3.0, 5.0]]]), "centred") == pytest.approx([1 + 6.25] * 2)


def test_offset_leaves_zero_padding_without_energy() -> None:
    layer, x = nn.Conv2d(1, 1, 3, padding=1, bias=False), torch.zeros(1, 1, 3, 3)
    assert energies(layer, x, "offset", 1.0) == pytest.approx([4, 6, 4, 6, 9, 6, 4, 6, 4])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("estimator", ["local", "drawn"])
def test_half_precision_weights(dtype: torch.dtype, estimator: str) -> None:
    # Pointwise on one pixel: half-precision matrix products are not available on every CPU.
    net = nn.Sequential(nn.Conv2d(3, 8, 1, groups=1)).to(dtype)
    model = undrift.perturb(net, estimator=estimator, init_fraction=0.1)
    assert model.noise["0"].log_var.dtype == torch.float32
    noise = model.noise["0"]
    x = images(2).to(dtype)
    zeros = torch.zeros(2, 8, 8, 8, dtype=dtype)
    hook = noise.local if estimator == "local" else noise.drawn
    y = hook(net[0], (x,), {}, zeros)
    assert y.dtype == dtype
    assert y.float().std() > 0
    y.float().square().sum().backward()
    assert torch.isfinite(noise.log_var.grad).all()
