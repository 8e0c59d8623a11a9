"""Keyed normal numbers: known answers, moments, independence, and what replays them."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import undrift
from support import convnet, images
from undrift.key import _GOLDEN, mix, normal


def test_mix_is_splitmix64() -> None:
    """The generator's published outputs for the seed 1234567."""
    state = torch.tensor([1234567]) + torch.arange(1, 4) * _GOLDEN
    assert [int(v) % 2**64 for v in mix(state)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_normal_has_the_moments_of_a_normal() -> None:
    """400,000 numbers; each bound is five standard errors."""
    x = normal(torch.tensor(3), (40, 10_000)).double()
    n = x.numel()
    assert abs(x.mean()) < 5 / math.sqrt(n)
    assert abs(x.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs((x**3).mean()) < 5 * math.sqrt(15 / n)
    assert abs((x**4).mean() - 3) < 5 * math.sqrt(96 / n)
    tail = (x.abs() > 3).double().mean()
    assert abs(tail - 0.0026998) < 5 * math.sqrt(0.0027 / n)


def test_normal_is_independent_across_rows_columns_and_keys() -> None:
    x = normal(torch.tensor(3), (200, 2000))
    others = [x.roll(1, 0), x.roll(1, 1), x.roll(1000, 1), normal(torch.tensor(4), (200, 2000))]
    for other in others:
        assert abs(float((x * other).mean())) < 5 / math.sqrt(x.numel())


def test_rows_depend_on_their_index_alone() -> None:
    key = torch.tensor(9)
    whole = normal(key, (6, 5, 3))
    assert torch.equal(whole[2:4], normal(key, (2, 5, 3), first_row=2))


def test_a_generator_makes_noise_reproducible_and_steps_differ() -> None:
    def outputs(seed: int) -> list[Tensor]:
        torch.manual_seed(0)
        model = undrift.perturb(convnet(), generator=torch.Generator().manual_seed(seed), norm_statistics="source")
        return [model(images()) for _ in range(2)]

    first, again, other = outputs(1), outputs(1), outputs(2)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], other[0])


@pytest.mark.parametrize("estimator", ["local", "drawn"])
def test_reseed_starts_anew(estimator: str) -> None:
    model = undrift.perturb(convnet(), norm_statistics="source", estimator=estimator)
    model.reseed(5)
    first = model(images())
    assert not torch.equal(model(images()), first)
    model.reseed(5)
    assert torch.equal(model(images()), first)


class Checkpointed(nn.Module):
    """Blocks that run again in the backward pass; the middle layer is used twice, once in each block."""

    def __init__(self, active: bool, *, reentrant: bool = False, preserve: bool = True) -> None:
        super().__init__()
        self.stem, self.norm, self.middle = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Conv2d(6, 6, 3, padding=1)
        self.head = nn.Linear(6, 4)
        self.active, self.reentrant, self.preserve = active, reentrant, preserve

    def block(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.middle(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(2):
            if self.active:
                x = checkpoint(self.block, x, use_reentrant=self.reentrant, preserve_rng_state=self.preserve)
            else:
                x = self.block(x)
        return self.head(x.mean((2, 3)))


def gradients(active: bool, forwards: int = 1, reentrant: bool = False, **options: object) -> list[Tensor]:
    torch.manual_seed(0)
    model = undrift.perturb(
        Checkpointed(active, reentrant=reentrant), generator=torch.Generator().manual_seed(1), **options
    )
    x = images().requires_grad_()
    sum(model(x).square().sum() for _ in range(forwards)).backward()
    return [p.grad for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("forwards", [1, 2])
@pytest.mark.parametrize("statistics", ["source", "batch", "moving"])
@pytest.mark.parametrize("estimator", ["local", "drawn"])
def test_activation_checkpointing_draws_the_same_noise_again(
    estimator: str, statistics: str, forwards: int, reentrant: bool
) -> None:
    options = {"estimator": estimator, "norm_statistics": statistics}
    for a, b in zip(
        gradients(False, forwards, **options), gradients(True, forwards, reentrant, **options), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_checkpoint_around_the_whole_network() -> None:
    def loss(outer: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = undrift.perturb(convnet(), generator=torch.Generator().manual_seed(1))
        y = checkpoint(model, images(), use_reentrant=False) if outer else model(images())
        y.square().sum().backward()
        return [p.grad for p in model.parameters() if p.requires_grad]

    for a, b in zip(loss(False), loss(True), strict=True):
        torch.testing.assert_close(a, b)


def test_a_checkpoint_that_cannot_be_replayed_is_an_error() -> None:
    model = undrift.perturb(Checkpointed(True, preserve=False))
    with pytest.raises(undrift.UndriftError, match="preserve_rng_state=True"):
        model(images()).sum().backward()


def test_prediction_leaves_the_global_generator_alone() -> None:
    model = undrift.perturb(convnet())
    before = torch.get_rng_state()
    with torch.no_grad():
        model(images())
    assert torch.equal(torch.get_rng_state(), before)


def test_passes_from_one_state_of_the_generator_are_told_apart() -> None:
    def run(active: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = undrift.perturb(Checkpointed(active), generator=torch.Generator().manual_seed(1))
        loss = torch.zeros(())
        for factor in (1, 2):
            torch.manual_seed(5)
            loss = loss + factor * model(images()).square().sum()
        loss.backward()
        return [p.grad for p in model.parameters() if p.requires_grad]

    for a, b in zip(run(False), run(True), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("estimator", ["local", "drawn"])
def test_a_part_called_by_itself_is_replayed_too(estimator: str) -> None:
    def run(active: bool) -> list[Tensor]:
        torch.manual_seed(0)
        net = Checkpointed(active)
        model = undrift.perturb(net, generator=torch.Generator().manual_seed(1), estimator=estimator)
        with torch.no_grad():
            model(images())
        net.forward(images()).square().sum().backward()  # not through the hooks of the root
        return [p.grad for p in model.parameters() if p.requires_grad]

    for a, b in zip(run(False), run(True), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
