"""Norm statistics as a posterior: hand-computed, forgotten by evidence, and robust against what is no domain."""

import pytest
import torch
from torch import Tensor, nn

import undrift
from undrift.posterior.domain_statistics import MOST, TELLING, DomainStatistics


def norm_of(channels: int = 2) -> tuple[undrift.Perturbed, DomainStatistics]:
    net = nn.Sequential(nn.BatchNorm2d(channels), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 3))
    model = undrift.perturb(net.eval(), layers=())
    model.eval()
    return model, DomainStatistics(16)


def scene(count: int, mean: float = 0.0, seed: int = 0) -> Tensor:
    """Return images whose means scatter by 1, with pixels that scatter by 1 around them."""
    g = torch.Generator().manual_seed(seed)
    return mean + torch.randn(count, 2, 1, 1, generator=g) + torch.randn(count, 2, 6, 6, generator=g)


def seen(model: undrift.Perturbed, statistics: DomainStatistics, x: Tensor) -> bool:
    assert statistics.start(model)
    with statistics.answering(model, "batch"), torch.no_grad():
        model(x)
    return statistics.take()


@pytest.mark.parametrize("count", [1, 4, TELLING - 1])
def test_few_images_are_weighed_against_the_prior_by_their_number(count: int) -> None:
    model, statistics = norm_of()
    layer = model.norms[0].layer
    with torch.no_grad():
        layer.running_mean.copy_(torch.tensor([0.5, -1.0]))
        layer.running_var.copy_(torch.tensor([2.0, 3.0]))
    source = layer.running_mean.clone(), layer.running_var.clone()
    x = scene(count)
    statistics.start(model)
    with statistics.answering(model, "batch"), torch.no_grad():
        model(x)
    mean, var = statistics.layers["0"]._answering
    own = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
    want = (16 * source[0] + count * own[0]) / (16 + count)
    second = (16 * (source[1] + source[0] ** 2) + count * (own[1] + own[0] ** 2)) / (16 + count)
    assert torch.allclose(mean, want, atol=1e-5)
    assert torch.allclose(var, second - want**2, atol=1e-5)
    assert torch.equal(layer.running_mean, source[0])  # lent for the pass only


def test_the_domain_is_carried_forward_and_its_images_count() -> None:
    model, statistics = norm_of()
    for number in range(6):
        assert not seen(model, statistics, scene(32, 3.0, number))
    layer = statistics.layers["0"]
    assert float(layer.worth[1]) == pytest.approx(6 * 32, rel=0.02)
    assert float(layer.worth[0]) < 1  # three scatters away, the prior is worth a ninth of an image
    together = torch.cat([scene(32, 3.0, number) for number in range(6)])
    assert torch.allclose(layer.rows[0][1], together.mean((0, 2, 3)), atol=1e-4)
    assert torch.allclose(layer.rows[1][1], together.var((0, 2, 3), correction=0), rtol=1e-3)
    for number in range(20):
        seen(model, statistics, scene(32, 3.0, number))
    assert float(layer.worth[1]) <= MOST


def test_a_domain_that_changed_is_forgotten_at_once() -> None:
    model, statistics = norm_of()
    changes = [seen(model, statistics, scene(32, -2.0, n)) for n in range(8)]
    changes += [seen(model, statistics, scene(32, 4.0, n)) for n in range(8)]
    assert changes == [n == 8 for n in range(16)]
    assert statistics.layers["0"].rows[0][1].mean() == pytest.approx(4.0, abs=0.3)


def test_a_constant_image_among_good_ones_moves_little() -> None:
    model, statistics = norm_of()
    for number in range(8):
        x = scene(32, seed=number)
        if number >= 4:
            x[0] = 20.0
        assert not seen(model, statistics, x)
    mean = statistics.layers["0"].rows[0][1]
    # An image at 20 among 32 moves a mean by 0.6, and the scatter that it makes itself keeps it from telling anything.
    assert float(mean.abs().max()) < 1.0
    alone, fresh = norm_of()
    for number in range(4):
        seen(alone, fresh, scene(32, seed=number))
    with fresh.answering(alone, "batch"), torch.no_grad():
        alone(torch.full((1, 2, 6, 6), 20.0))
    mean, var = fresh.layers["0"]._answering
    assert float(mean.abs().max()) < 0.5  # one of 200
    assert torch.isfinite(var).all()


def test_images_that_are_not_finite_or_without_scatter_leave_finite_statistics() -> None:
    model, statistics = norm_of()
    seen(model, statistics, torch.zeros(32, 2, 6, 6))
    broken = scene(32)
    broken[3] = torch.nan
    seen(model, statistics, broken)
    for layer in statistics.layers.values():
        assert all(row.isfinite().all() for row in (*layer.rows, layer.worth))


def test_it_resumes_bit_for_bit_and_gives_out_what_stays() -> None:
    model, statistics = norm_of()
    seen(model, statistics, scene(32))
    state = statistics.state_dict()
    kept = {part: tensor.clone() for part, tensor in state["0"].items()}
    other = DomainStatistics(16)
    other.load_state_dict(state, model)
    for one in (statistics, other):
        seen(model, one, scene(32, 2.0, 1))
    assert all(torch.equal(a, b) for a, b in zip(state["0"].values(), kept.values(), strict=True))
    mine, theirs = statistics.state_dict()["0"], other.state_dict()["0"]
    assert all(torch.equal(mine[part], theirs[part]) for part in mine)


def test_a_network_without_batch_norm_has_none() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    assert not DomainStatistics(16).start(undrift.perturb(net))


def test_images_that_are_not_to_count_count_in_the_first_half_of_the_layers() -> None:
    net = nn.Sequential(*(nn.BatchNorm2d(2) for _ in range(4)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 3))
    model = undrift.perturb(net.eval(), layers=())
    model.eval()
    statistics = DomainStatistics(16)
    x = scene(64, 3.0)
    statistics.start(model)
    with statistics.answering(model, "kept"), torch.no_grad():
        model(x)
    means = [layer._answering[0] for layer in statistics.layers.values()]
    assert float((means[0] / x.mean((0, 2, 3))).mean()) == pytest.approx(64 / (64 + 16), rel=0.05)
    assert torch.equal(means[2], model.norms[2].layer.running_mean)
    assert torch.equal(means[3], model.norms[3].layer.running_mean)
    before = statistics.state_dict()
    assert not statistics.take()  # nothing was counted
    assert all(torch.equal(statistics.state_dict()[name]["mean"], kept["mean"]) for name, kept in before.items())


@pytest.mark.parametrize("flat", [True, False])
def test_a_batch_that_should_not_count_counts_early_where_layers_have_positions(flat: bool) -> None:
    norms = [nn.BatchNorm1d(2), nn.BatchNorm1d(2)] if flat else [nn.BatchNorm2d(2), nn.BatchNorm2d(2)]
    net = nn.Sequential(*norms).eval()
    model, statistics = undrift.perturb(net, layers=()), DomainStatistics(16)
    assert statistics.start(model)
    x = scene(64, 3.0)[:, :, 0, 0] if flat else scene(64, 3.0)
    with statistics.answering(model, "kept"), torch.no_grad():
        out = model(x)
    with model.off() as source, torch.no_grad():
        # A layer without positions sees classes from the start; one with them sees colours and noise.
        assert torch.allclose(out, source(x), atol=1e-4) == flat
