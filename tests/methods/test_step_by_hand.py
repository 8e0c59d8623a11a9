"""Tent-FT, VMP and Bayes by backprop on a stream: steps by hand, what stays, and what a reset restores."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import undrift
from online_support import batches, close, entropies, network, trained, twin
from support import images, same, snapshot
from undrift import Stream

NOISY = ("0", "3", "7")  # the layers of `smooth` that have weights


def smooth() -> nn.Sequential:
    """Return a classifier in float64 without a ReLU: no input is 0, so every draw can be told from an output."""
    torch.manual_seed(6)
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.Tanh(),
        nn.Conv2d(6, 4, 3, stride=2, groups=2),
        nn.GroupNorm(2, 4),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(36, 5),
    )
    return net.double().eval()


def seen() -> list[Tensor]:
    return [images(10, seed).double() for seed in range(3)]


def linear(layer: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if isinstance(layer, nn.Linear):
        return F.linear(x, weight, bias)
    assert isinstance(layer, nn.Conv2d)
    return F.conv2d(x, weight, bias, layer.stride, layer.padding, 1, layer.groups)


class ByHand:
    """The objective of paper eq. 3 in plain PyTorch: means, log-variances, and draws that are given."""

    def __init__(self, every_weight: bool) -> None:
        self.net, self.source = smooth().requires_grad_(every_weight), smooth()
        for name in ("1", "4"):
            self.net.get_submodule(name).requires_grad_(True)
        self.net[1].train().track_running_stats = False
        self.log_var: dict[str, Tensor] = {}
        for name in NOISY:
            weight = self.source.get_submodule(name).weight
            # A variance a kernel, but one a weight in linear layers (VMP) or everywhere (Bayes by backprop).
            of_weights = every_weight or weight.ndim == 2
            start = (0.01 * self.prior(name)).expand_as(weight) if of_weights else 0.01 * self.prior(name).flatten()
            self.log_var[name] = start.detach().log().clone().requires_grad_()
        rate = 1e-4 if every_weight else 5e-4
        self.optimiser = torch.optim.Adam([*trained(self.net), *self.log_var.values()], lr=rate)

    def prior(self, name: str) -> Tensor:
        weight = self.source.get_submodule(name).weight.detach()
        return weight.flatten(1).var(1).reshape(-1, *[1] * (weight.ndim - 1))

    def variance(self, name: str) -> Tensor:
        """Return σ², a weight at a time."""
        weight, log_var = self.source.get_submodule(name).weight, self.log_var[name]
        shaped = log_var if log_var.ndim == weight.ndim else log_var.reshape(-1, *[1] * (weight.ndim - 1))
        return shaped.exp().expand_as(weight)

    def std(self, name: str, x: Tensor) -> Tensor:
        energy = x - x.mean((2, 3), keepdim=True) if name == "0" else x  # the first layer sees raw images
        return linear(self.net.get_submodule(name), energy.square(), self.variance(name), None).sqrt()

    def loss(self, x: Tensor, drawn: dict[str, Tensor], size: int) -> tuple[Tensor, Tensor]:
        """Return the mean entropy under the draws, and the KL of all weights over the number of images so far."""
        for name, layer in self.net.named_children():
            y = layer(x)
            x = y + self.std(name, x) * drawn[name] if name in NOISY else y
        kl = torch.zeros(())
        for name in NOISY:
            prior, ratio = self.prior(name), self.variance(name) / self.prior(name)
            moved = self.net.get_submodule(name).weight - self.source.get_submodule(name).weight
            kl = kl + 0.5 * (ratio - 1 - ratio.log()).sum() + (moved.square() / (2 * prior)).sum()
        return entropies(x).mean(), kl / size


def draws_of(model: undrift.Perturbed, hand: ByHand) -> dict[str, Tensor]:
    """Return a dict that each step fills with ε, from what the layers are given and what they give."""
    found: dict[str, Tensor] = {}

    def look(name: str) -> Callable[..., None]:
        def hook(layer: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
            if torch.is_grad_enabled():  # a step; answers have draws of their own
                with torch.no_grad():
                    plain = linear(layer, args[0], layer.weight, layer.bias)  # type: ignore[arg-type]
                    found[name] = (output - plain) / hand.std(name, args[0])

        return hook

    for name in NOISY:
        model.net.get_submodule(name).register_forward_hook(look(name))
    return found


@pytest.mark.parametrize("name", ["vmp", "vmp:paper", "bbb"])
def test_a_drawn_stream_is_three_steps_by_hand(name: str) -> None:
    going = undrift.stream(smooth(), seen(), method=name, generator=torch.Generator().manual_seed(0))
    hand = ByHand(every_weight=name == "bbb")
    model, drawn = going.model, draws_of(going.model, hand)
    for number, x in enumerate(seen(), start=1):
        next(going)
        every = torch.cat([e.flatten() for e in drawn.values()])
        assert abs(float(every.mean())) < 0.1
        assert abs(float(every.std()) - 1) < 0.1
        likelihood, kl = hand.loss(x, drawn, 10 * number)
        assert going.latest["likelihood"] == pytest.approx(likelihood.item(), rel=1e-9)
        assert going.latest["kl"] == pytest.approx(kl.item(), rel=1e-9)
        hand.optimiser.zero_grad()
        (likelihood + kl).backward()
        hand.optimiser.step()
        for layer in NOISY:
            torch.testing.assert_close(model.noise[layer].log_var, hand.log_var[layer])
        close_nets(model.net, hand.net)
    moved = {n for n, p in model.net.named_parameters() if not torch.equal(p, hand.source.get_parameter(n))}
    norm_affine = {f"{layer}.{which}" for layer in (1, 4) for which in ("weight", "bias")}
    assert moved == (set(dict(hand.net.named_parameters())) if name == "bbb" else norm_affine)


def close_nets(one: nn.Module, other: nn.Module) -> None:
    for (name, got), wanted in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, msg=lambda text, name=name: f"{name}: {text}")


def test_the_kl_of_free_means_by_hand() -> None:
    model = undrift.stream(smooth(), seen(), method="bbb").model
    hand = ByHand(every_weight=True)
    with torch.no_grad():
        for net in (model.net, hand.net):
            for name in NOISY:
                net.get_submodule(name).weight.mul_(1.5)  # type: ignore[operator, union-attr]
    still = copy.deepcopy(hand)
    still.net.load_state_dict(still.source.state_dict())
    nothing = {name: torch.zeros(()) for name in NOISY}
    (_, kl), (_, at_the_source) = (by.loss(seen()[0], nothing, 1) for by in (hand, still))
    assert kl.item() > at_the_source.item() + 10
    assert undrift.kl(model, "sum").item() == pytest.approx(kl.item(), rel=1e-9)
    for name in NOISY:  # and the prior's variance is that of the source's weights, whatever became of them
        torch.testing.assert_close(model.noise[name].prior_var.flatten(), hand.prior(name).flatten())


def test_tent_ft_is_three_steps_by_hand_and_answers_before_each() -> None:
    net = twin(train=True)
    optimiser = torch.optim.Adam(trained(net), lr=1e-5)
    source = network()
    going = undrift.stream(network(), batches(), method="tent-ft")
    for x, got in zip(batches(), going, strict=True):
        logits = net(x)
        torch.testing.assert_close(got.probs, logits.detach().softmax(1))
        optimiser.zero_grad()
        entropies(logits).mean().backward()
        optimiser.step()
        close(going.model, net)
    assert going.report.steps == 3
    moved = {n for n, p in going.model.net.named_parameters() if not torch.equal(p, source.get_parameter(n))}
    assert moved == set(dict(source.named_parameters()))
    # Nothing is kept of a batch's statistics.
    assert all(torch.equal(b, source.get_buffer(n)) for n, b in going.model.net.named_buffers())


@pytest.mark.parametrize("name", ["tent-ft", "vmp", "vmp:released", "bbb"])
def test_a_reset_restores_weights_statistics_noise_and_optimiser(name: str) -> None:
    one, two, _ = batches()

    def start(given: list[Tensor], **more: bool) -> Stream:
        return undrift.stream(network(), given, method=name, generator=torch.Generator().manual_seed(0), **more)

    going = start([one, two, one])
    before = snapshot(going.model)
    first, after_one = next(going), snapshot(going.model)
    next(going)
    assert not same(snapshot(going.model), before)
    assert (going.online.seen, bool(going.online.optimiser.state)) == (24, True)
    going.online.reset()
    assert same(snapshot(going.model), before)
    assert (going.online.seen, bool(going.online.optimiser.state)) == (0, False)
    again = next(going)
    assert torch.equal(again.probs, first.probs)
    assert same(snapshot(going.model), after_one)
    # An episode is that, before each batch.
    *_, last = start([two, one], episodic=True)
    assert torch.equal(last.probs, first.probs)
