"""A-distance: 0 for one domain cut in two, 2 for two that anybody tells apart; σ beside where it started."""

import warnings

import pytest
import safetensors.torch
import torch
from torch import nn

import undrift
from undrift import shift


def small() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 3),
    )


def test_the_same_domain_has_no_distance_and_another_the_greatest():
    net = small()
    images = torch.rand(120, 3, 6, 6)
    same = shift.a_distance(net, images[:60], images[60:])
    apart = shift.a_distance(net, images[:60], images[60:] + 3)
    assert list(same) == list(apart) == ["0", "5"]
    assert apart["0"] == 2.0
    assert all(0 <= d < 0.6 for d in same.values())


def test_a_wider_gap_is_a_larger_distance():
    net = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Flatten(), nn.Linear(4, 2))
    images = torch.randn(400, 1, 2, 2)
    found = [shift.a_distance(net, images[:200], images[200:] + gap)["0"] for gap in (0.0, 0.5, 1.0, 2.0)]
    assert found == sorted(found)
    # The mean of four normal pixels, two means apart by g: the best threshold errs with Φ(−g), here Φ(−1) = 0.159.
    assert found[2] == pytest.approx(2 * (1 - 2 * 0.1587), abs=0.15)


def test_the_held_out_error_is_that_of_the_best_line():
    generator = torch.Generator().manual_seed(1)
    one = torch.randn(4000, 3, generator=generator)
    other = torch.randn(4000, 3, generator=generator) + torch.tensor([2.0, 0.0, 0.0])
    assert shift.domain_error(one, other) == pytest.approx(0.1587, abs=0.015)


def test_more_features_than_images_and_constant_ones_are_no_trouble():
    one, other = torch.randn(20, 300), torch.randn(20, 300) + 1
    assert shift.domain_error(one, other) < 0.05
    nothing = torch.ones(20, 4)
    assert shift.domain_error(nothing, nothing) == 0.5


def test_the_span_of_the_rows_gives_the_same_classifier():
    rows, signs = torch.randn(12, 5).double(), torch.tensor([1.0, -1.0] * 6).double()
    wide = torch.cat([rows, torch.zeros(12, 20).double()], 1)  # as good as `rows`, but wider than high
    weight, bias = shift._logistic(rows, signs, 0.1)
    again, other = shift._logistic(wide, signs, 0.1)
    torch.testing.assert_close(again[:5], weight)
    torch.testing.assert_close(other, bias)


def test_named_layers_loaders_and_perturbed_networks():
    net = small()
    images = torch.rand(80, 3, 6, 6)
    plain = shift.a_distance(net, images[:40], images[40:] * 2, ["2"])
    loader = [(images[:10], None), (images[10:40], None)]
    assert shift.a_distance(net, loader, images[40:] * 2, ["2"]) == plain
    model = undrift.perturb(net, norm_statistics="source")
    assert shift.a_distance(model, images[:40], images[40:] * 2, ["2"]) == plain  # the mean network, without noise
    assert not net[2]._forward_hooks


def test_what_is_wrong_is_said():
    net = small()
    images = torch.rand(40, 3, 6, 6)
    with pytest.raises(undrift.OptionError, match=r"layers names 'fc', which is no submodule.*needed.*Name one of"):
        shift.a_distance(net, images, images, ["fc"])
    with pytest.raises(undrift.DataError, match=r"has 7 images; needed: at least 8.*Give more"):
        shift.a_distance(net, images, images[:7])
    with pytest.raises(undrift.OptionError, match="penalty"):
        shift.a_distance(net, images, images, penalty=0)
    with pytest.raises(undrift.OptionError, match="no convolution"):
        shift.a_distance(nn.Sequential(nn.Flatten()), images, images)
    with pytest.raises(undrift.UndriftError, match="needs a perturbed network"):
        shift.sigma(net)


@pytest.mark.parametrize("count", [8, 39, 40])
def test_few_images_are_measured_and_chance_is_said(count):
    net, images = small(), torch.rand(80, 3, 6, 6)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert shift.a_distance(net, images[:40], images[40 : 40 + count] + 3)["0"] == 2.0
    assert [warning.category for warning in said] == [undrift.UndriftWarning] * (count < 40)
    for warning in said:
        assert warning.filename == __file__  # where the user called it
        assert f"has {count} images, and below 40 of each much of an A-distance is chance" in str(warning.message)


@pytest.mark.parametrize("sharing", ["kernel", "weight"])
def test_sigma_shows_where_it_started_and_where_it_went(sharing):
    net = small()
    model = undrift.perturb(net, init_fraction=0.01, conv_sharing=sharing)
    with torch.no_grad():
        model.noises()[0].log_var += 2 * torch.log(torch.tensor(3.0))  # σ times three
    first, last = shift.sigma(model)
    assert (first.layer, last.layer) == ("0", "5")
    assert (first.l1, last.l1) == pytest.approx((3 * first.start_l1, last.start_l1))
    assert (first.start_relative, first.relative[0]) == pytest.approx((0.1, 0.3))
    std = net[0].weight.detach().flatten(1).std(1)
    expected = 0.1 * std.sum() * (1 if sharing == "kernel" else 27)
    assert first.start_l1 == pytest.approx(float(expected), rel=1e-5)


def test_no_noise_at_all_is_zero():
    rows = shift.sigma(undrift.perturb(small(), init_fraction=0))
    assert [(row.l1, row.start_l1, row.start_relative) for row in rows] == [(0, 0, 0)] * 2


def test_the_larger_domain_is_drawn_from_and_not_cut():
    """Its first half is the other domain once more, its second far away: cut, there is no distance at all."""
    net = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Flatten(), nn.Linear(4, 2))
    near = torch.randn(60, 1, 2, 2)
    larger = torch.cat([torch.randn(60, 1, 2, 2), 50 + torch.randn(540, 1, 2, 2)])
    cut = shift.a_distance(net, near, larger[:60])["0"]
    found = shift.a_distance(net, near, larger)["0"]
    assert cut < 0.8
    assert found > 1.4  # nine of ten are far
    assert found == shift.a_distance(net, near, larger)["0"]
    seeds = {shift.a_distance(net, near, larger, seed=seed)["0"] for seed in range(4)}
    assert len(seeds) > 1


def test_images_that_are_not_finite_are_left_out():
    net = small()
    images = torch.rand(80, 3, 6, 6)
    spoilt = torch.cat([images[:40], torch.full((2, 3, 6, 6), float("nan"))])
    spoilt[41] = float("inf")
    assert shift.a_distance(net, spoilt, images[40:] * 2) == shift.a_distance(net, images[:40], images[40:] * 2)
    assert shift.a_distance(net, [spoilt[:40], spoilt[40:]], images[40:] * 2)["0"] >= 0  # a batch with none left
    with pytest.raises(undrift.DataError, match="has 7 images; needed: at least 8"):
        shift.a_distance(net, images, torch.cat([images[:7], spoilt[40:]]))
    with pytest.raises(undrift.DataError, match="has 0 images; needed: at least 8"):
        shift.a_distance(net, images, images * float("nan"))


def noisy(net: nn.Module, images: torch.Tensor, **options: object) -> undrift.Perturbed:
    """Return the network with statistics that noisy passes have moved."""
    model = undrift.perturb(net, **{"init_fraction": 0.3, "norm_statistics": "domain", **options})
    with torch.no_grad():
        model(images)
    return model


def outputs_of(net: nn.Module, layer: nn.Module, *args: object) -> tuple[dict[str, float], list[torch.Tensor]]:
    """Return the distances, and what the layer gave to each batch that was looked at for them."""
    seen: list[torch.Tensor] = []
    handle = layer.register_forward_hook(lambda _m, _a, output: seen.append(output.detach()))
    try:
        return shift.a_distance(net, *args), seen
    finally:
        handle.remove()


@pytest.mark.parametrize("estimator", ["local", "drawn"])
def test_the_mean_network_is_looked_at_under_statistics_that_fit_it(estimator, tmp_path):
    """They are those of the exported network that has seen the same images; kept ones are of noisy passes."""
    net, one, other = small(), torch.rand(40, 3, 6, 6), 1.2 * torch.rand(60, 3, 6, 6)
    with torch.no_grad():
        other[3] = float("nan")
    model = noisy(net, torch.rand(40, 3, 6, 6), estimator=estimator)
    finite = torch.cat([other[:3], other[4:]])
    undrift.export(model, tmp_path / "mean.safetensors", images=[one, finite])
    plain = small().eval()
    plain.load_state_dict(safetensors.torch.load_file(tmp_path / "mean.safetensors"))
    wanted, expected = outputs_of(plain, plain[5], one, finite)
    before, step, known = {n: t.clone() for n, t in model.state_dict().items()}, model.key.step.clone(), model.norms[0]
    distances, seen = outputs_of(model, net[5], one, other)
    assert distances == wanted
    assert len(seen) == 4  # once for the statistics
    torch.testing.assert_close(seen[2:], expected)
    with model.mean(), torch.no_grad():
        assert not torch.allclose(model.eval()(one), expected[0], rtol=0.01)  # the kept ones would be others
    model.key.step.copy_(step)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert (known.statistics, known.noisy) == ("domain", True)
    # Batches that come once are seen twice all the same, and nothing is left of the first time.
    assert shift.a_distance(model, iter([one]), (batch for batch in [other])) == wanted
    assert torch.equal(model.key.step, step)


@pytest.mark.parametrize(
    "options",
    [{"init_fraction": 0.0}, {"layers": ()}, {"norm_statistics": "source"}, {"norm_statistics": "batch"}],
)
def test_statistics_that_fit_are_those_that_were_kept(options):
    net, one, other = small(), torch.rand(40, 3, 6, 6), 1.2 * torch.rand(40, 3, 6, 6)
    model = noisy(net, torch.rand(40, 3, 6, 6), **options)
    _, seen = outputs_of(model, net[5], one, other)
    with model.mean(), torch.no_grad():
        torch.testing.assert_close(seen, [model.eval()(one), model(other)])
    with model.off():
        _, seen = outputs_of(model, net[5], one, other)
        torch.testing.assert_close(seen, [net.eval()(one).detach(), net(other).detach()])


def test_noise_does_not_tell_a_domain_from_itself():
    """One Δw a batch would: under a draw for each half of one domain, the halves lie apart."""
    images = torch.rand(120, 3, 6, 6)
    model = noisy(small(), images, estimator="drawn")
    found = shift.a_distance(model, images[:60], images[60:])
    assert all(0 <= d < 0.6 for d in found.values())
