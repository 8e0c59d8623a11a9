"""BACS: its posterior's moments, its penalty and steps by hand, and the members' answer together."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import undrift
from prepared_support import UNTRAINED, small
from support import images, same, snapshot
from undrift import Prediction, methods, together
from undrift.images import TensorDomain
from undrift.keep import Moments, Posterior
from undrift_bench.train import TrainOptions, collect_moments


def test_moments_are_mean_and_variance_of_the_iterates(tmp_path: Path) -> None:
    net = nn.Linear(3, 2)
    moments = Moments(net)
    seen = []
    for seed in range(4):
        torch.manual_seed(seed)
        net.reset_parameters()
        moments.add(net)
        seen.append(net.weight.detach().double())
    every = torch.stack(seen)
    torch.testing.assert_close(moments.mean["weight"], every.mean(0))
    torch.testing.assert_close(moments.variance()["weight"], every.square().mean(0) - every.mean(0).square())
    moments.save(tmp_path / "posterior.safetensors")
    model = undrift.perturb(net, methods.get("bacs").options)
    Posterior(str(tmp_path / "posterior.safetensors")).start(model)
    torch.testing.assert_close(model.net.weight.double(), every.mean(0), atol=1e-6, rtol=1e-6)


def test_one_iterate_has_no_variance_and_another_network_no_place() -> None:
    moments = Moments(nn.Linear(3, 2))
    moments.add(nn.Linear(3, 2))
    with pytest.raises(undrift.OptionError, match="1 iterates; a variance needs at least two"):
        moments.variance()
    with pytest.raises(undrift.PerturbationMismatch, match="differs in weight"):
        moments.add(nn.Linear(4, 2))
    with pytest.raises(undrift.OptionError, match="posterior is an int"):
        Posterior(3)
    with pytest.raises(undrift.DataError, match="cannot be read"):
        Posterior("nowhere.safetensors")


def test_the_penalty_by_hand() -> None:
    net = nn.Linear(2, 2)
    mean = {"weight": torch.full((2, 2), 0.5), "bias": torch.full((2,), 0.5)}
    var = {name: torch.full_like(value, 0.25) for name, value in mean.items()}
    keeper = Posterior({"mean": mean, "var": var}, posterior_weight=2.0, floor=0.25)
    model = undrift.perturb(net, methods.get("bacs").options)
    keeper.start(model)
    assert keeper.penalty(model) == 0  # it starts at the mean
    with torch.no_grad():
        for parameter in (model.net.weight, model.net.bias):
            parameter += 1
    assert float(keeper.penalty(model).detach()) == pytest.approx(2 * 0.5 * 6 / (0.25 + 0.25))


def test_two_steps_of_bacs_by_hand() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    mean = {"1.weight": torch.randn(3, 12) * 0.1, "1.bias": torch.zeros(3)}
    var = {name: torch.full_like(value, 0.5) for name, value in mean.items()}
    batches = [torch.rand(4, 3, 2, 2), torch.rand(4, 3, 2, 2)]
    settings = {
        "stream_optimiser": "sgd",
        "momentum": 0.0,
        "stream_lr": 0.1,
        "alpha": 2.0,
        "posterior_weight": 3.0,
        "floor": 0.1,
    }
    going = undrift.stream(net, batches, method="bacs", posterior={"mean": mean, "var": var}, **settings)
    answers = list(going)
    weight, bias = (value.clone().requires_grad_() for value in mean.values())
    for batch, answer in zip(batches, answers, strict=True):
        logits = batch.flatten(1) @ weight.T + bias
        torch.testing.assert_close(answer.probs, logits.softmax(1))  # from before the step, from μ on
        loss = 2.0 * undrift.entropy(logits)
        for value, centre in zip((weight, bias), mean.values(), strict=True):
            loss = loss + 3.0 * 0.5 * ((value - centre) ** 2 / (0.5 + 0.1)).sum()
        gradients = torch.autograd.grad(loss, (weight, bias))
        with torch.no_grad():
            for value, gradient in zip((weight, bias), gradients, strict=True):
                value -= 0.1 * gradient
    torch.testing.assert_close(going.model.net[1].weight, weight, check_stride=False)


def test_bacs_changes_all_weights_and_says_that_its_posterior_is_untrained() -> None:
    net = small()
    before = snapshot(net)
    with pytest.warns(undrift.UndriftWarning, match=UNTRAINED):
        going = undrift.stream(net, [images(4)], method="bacs")
    assert same(before, snapshot(net))  # its mean is the source
    list(going)
    after = snapshot(going.model.net)
    still = [name for name in before if torch.equal(before[name], after[name])]
    assert still == []
    assert same(before, snapshot(going.remove()))
    row = methods.get("bacs")
    assert (row.source_free, row.ensemble, row.uncertainty) == (False, True, True)
    assert "posterior" in row.needs


@pytest.mark.parametrize("search", ["rates.json", "rates-cuda.json"])
def test_the_rate_is_what_the_searches_took(search: str) -> None:
    record = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / search).read_text("utf-8"))
    options = methods.get("bacs").options
    assert (options.stream_lr, options.adapt_lr) == (record["bacs"]["chosen"],) * 2


def test_an_untrained_posterior_has_a_fraction_of_each_kernels_variance() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 6, 2, groups=2), nn.Flatten(), nn.Linear(6 * 49, 2))
    model = undrift.perturb(net, methods.get("bacs").options)
    keeper = Posterior(fraction=0.5, posterior_weight=2.0)
    with pytest.warns(undrift.UndriftWarning, match=UNTRAINED):
        keeper.start(model)
    with torch.no_grad():
        model.net[0].weight[1] += 0.1
    with model.off() as source:
        wanted = 27 * 0.1**2 / (0.5 * source[0].weight[1].var(correction=0) + 1e-6)
    torch.testing.assert_close(keeper.penalty(model).detach(), wanted, rtol=1e-4, atol=1e-6)


def test_bacs_starts_at_its_mean_and_resets_to_it() -> None:
    net = small()
    mean = {name: value + 0.1 for name, value in net.named_parameters()}
    posterior = {"mean": mean, "var": {name: torch.ones_like(value) for name, value in mean.items()}}
    going = undrift.stream(net, [images(4)], method="bacs", posterior=posterior)
    list(going)
    assert not torch.equal(going.model.net.fc.weight, mean["fc.weight"])
    going.online.reset()
    assert torch.equal(going.model.net.fc.weight, mean["fc.weight"])


def test_moments_of_further_source_epochs() -> None:
    images_, labels = torch.randint(0, 256, (12, 3, 8, 8), dtype=torch.uint8), torch.arange(12) % 5
    domain = TensorDomain("source", images_, labels)
    net = small()
    before = snapshot(net)
    options = TrainOptions(epochs=3, batch_size=4, lr=0.01, schedule="constant", held_out=0)
    moments = collect_moments(net, domain, options, device="cpu")
    assert moments.count == 2
    assert same(before, snapshot(net))
    assert all(float(var.max()) > 0 for name, var in moments.variance().items() if name.endswith("weight"))
    list(undrift.stream(net, [images(4)], method="bacs", posterior=moments))  # fits, and no warning


def test_members_answer_together() -> None:
    one, two = torch.tensor([[0.9, 0.1], [0.5, 0.5]]), torch.tensor([[0.1, 0.9], [0.5, 0.5]])
    (both,) = together([[Prediction.of(one)], [Prediction.of(two)]])
    torch.testing.assert_close(both.probs, torch.full((2, 2), 0.5))
    inner = -(0.9 * math.log(0.9) + 0.1 * math.log(0.1))
    torch.testing.assert_close(both.mutual_info, torch.tensor([math.log(2) - inner, 0.0]), atol=1e-6, rtol=0)
    (half,) = together([[Prediction.of(one)], [Prediction.unknown(2, two)]])
    torch.testing.assert_close(half.probs, one)
    (none,) = together([[Prediction.unknown(2, one)], [Prediction.unknown(2, two)]])
    assert none.label.tolist() == [-1, -1]
    batches = list(images(4).split(2))
    streams = [undrift.stream(small(seed), batches, method="source") for seed in (0, 1)]
    answers = list(together(streams))
    wanted = (small(0)(images(4)).softmax(1) + small(1)(images(4)).softmax(1)) / 2
    torch.testing.assert_close(torch.cat([p.probs for p in answers]), wanted)
