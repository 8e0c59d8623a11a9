"""Norm policies: whose statistics, what is trained, and that flags and averages stay sound."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import undrift
from faults import recorded_in_a_graph
from support import images

BATCH_NORMS = [
    (nn.BatchNorm1d, (6, 4)),
    (nn.BatchNorm1d, (6, 4, 5)),
    (nn.BatchNorm2d, (6, 4, 3, 3)),
    (nn.BatchNorm3d, (6, 4, 2, 3, 3)),
    (nn.SyncBatchNorm, (6, 4, 3, 3)),
]


def network(layer: nn.Module) -> nn.Module:
    """Return the layer beside something to perturb, which its input does not pass."""

    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.other = layer, nn.Linear(1, 1)

        def forward(self, x: Tensor) -> Tensor:
            self.other(x.new_ones(1))
            return self.norm(x)

    with torch.no_grad():
        for name, tensor in layer.state_dict().items():
            if tensor.is_floating_point():
                tensor.uniform_(0.5, 1.5) if "var" in name else tensor.normal_()
    return Beside().eval()


@pytest.mark.parametrize(("kind", "size"), BATCH_NORMS)
@pytest.mark.parametrize("train", [True, False])
def test_batch_norm_statistics(kind: type[nn.Module], size: tuple[int, ...], train: bool) -> None:
    x = 3 * torch.randn(size) + 2
    dims = [0, *range(2, len(size))]
    shape = (1, -1) + (1,) * (len(size) - 2)

    def normalised(layer: nn.Module, mean: Tensor, var: Tensor) -> Tensor:
        scale = layer.weight.view(shape) / (var.view(shape) + layer.eps).sqrt()
        return (x - mean.view(shape)) * scale + layer.bias.view(shape)

    for statistics in ("source", "batch", "moving"):
        net = network(kind(4))
        source = {k: v.clone() for k, v in net.norm.state_dict().items()}
        model = undrift.perturb(net, norm_statistics=statistics, norm_momentum=0.25)
        net.train(train)  # the policy does not depend on it
        y = model(x)
        if statistics == "source":
            mean, var = source["running_mean"], source["running_var"]
        elif statistics == "batch":
            mean, var = x.mean(dims), x.var(dims, correction=0)
        else:
            mean = 0.75 * source["running_mean"] + 0.25 * x.mean(dims)
            var = 0.75 * source["running_var"] + 0.25 * x.var(dims)
        torch.testing.assert_close(y, normalised(net.norm, mean, var))
        if statistics != "moving":
            assert torch.equal(net.norm.running_mean, source["running_mean"])
        assert net.norm.training is train
        assert net.norm.track_running_stats is True
        model.remove()
        assert all(torch.equal(v, source[k]) for k, v in net.norm.state_dict().items())


def test_a_captured_graph_moves_statistics_where_they_are() -> None:
    """Replays know nothing of new tensors. Elsewhere they are new: an earlier pass may need the old ones."""
    found = []
    for captured in (False, True):
        torch.manual_seed(0)
        model = undrift.perturb(network(nn.BatchNorm2d(4)), norm_statistics="moving", norm_momentum=0.3).train()
        layer = model.norms[0].layer
        before = layer.running_mean
        with recorded_in_a_graph() if captured else nullcontext():
            model(torch.randn(6, 4, 3, 3))
        assert (layer.running_mean is before) == captured
        found.append((layer.running_mean, layer.running_var))
    torch.testing.assert_close(found[0], found[1])


def test_moving_statistics_rest_in_eval_mode() -> None:
    net = network(nn.BatchNorm2d(3))
    model = undrift.perturb(net, norm_statistics="moving")
    model.eval()
    before = net.norm.running_mean.clone()
    model(images())
    assert torch.equal(net.norm.running_mean, before)
    model.train()
    model(images())
    assert not torch.equal(net.norm.running_mean, before)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_moving_statistics_survive_a_broken_image(poison: float) -> None:
    net = network(nn.BatchNorm2d(3))
    model = undrift.perturb(net, norm_statistics="moving")
    x = images()
    x[0, 1, 0, 0] = poison
    model(x)
    assert torch.isfinite(net.norm.running_mean).all()
    assert torch.isfinite(net.norm.running_var).all()
    assert torch.isfinite(model(images())).all()


@pytest.mark.parametrize(
    ("layer", "size"),
    [(nn.BatchNorm2d(3), (6, 3, 4, 4)), (nn.InstanceNorm2d(3, track_running_stats=True), (6, 3, 4, 4))],
)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_only_the_broken_channel_stays_where_it_was(layer: nn.Module, size: tuple[int, ...], poison: float) -> None:
    net = network(layer)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    model = undrift.perturb(net, norm_statistics="moving", norm_momentum=0.5)
    x = torch.randn(size) + 5
    x[0, 1, 0, 0] = poison
    model(x)
    for name in ("running_mean", "running_var"):
        # Not ==: in PyTorch 2.6 a pass of an instance norm in eval mode rounds its averages anew.
        stays = layer.state_dict()[name].isclose(before[name])
        assert stays.tolist() == [False, True, False]
    model.remove()


def test_the_mean_of_instances_may_overflow_alone() -> None:
    layer = nn.InstanceNorm1d(2, track_running_stats=True)
    model = undrift.perturb(network(layer), norm_statistics="moving")
    model(torch.full((6, 2, 4), 3e38))
    assert torch.isfinite(layer.running_mean).all()


def test_moving_statistics_take_a_batch_of_one_and_batch_statistics_refuse_it() -> None:
    x = torch.randn(1, 4)
    net = network(nn.BatchNorm1d(4))
    model = undrift.perturb(net, norm_statistics="moving")
    assert torch.isfinite(model(x)).all()
    model.remove()
    model = undrift.perturb(net, norm_statistics="batch")
    with pytest.raises(undrift.UndriftError, match=r"norm .*one value per channel.*at least two.*norm_statistics"):
        model(x)


def test_moving_statistics_in_inference_mode_can_be_trained_on_afterwards() -> None:
    net = network(nn.BatchNorm2d(3))
    model = undrift.perturb(net, norm_statistics="moving")
    with torch.inference_mode():
        model(images())
    model.eval()
    model(images()).sum().backward()
    assert net.norm.weight.grad is not None


@pytest.mark.parametrize(
    ("layer", "size"),
    [
        (nn.GroupNorm(2, 4), (3, 4, 5)),
        (nn.LayerNorm(5), (3, 4, 5)),
        (nn.RMSNorm(5), (3, 4, 5)),
        (nn.InstanceNorm2d(4, affine=True), (3, 4, 5, 5)),
        (nn.InstanceNorm1d(4, affine=True, track_running_stats=True), (3, 4, 5)),
        (nn.BatchNorm1d(4, track_running_stats=False), (3, 4)),
    ],
)
def test_other_norms_train_their_affine(layer: nn.Module, size: tuple[int, ...]) -> None:
    net, x = network(layer), torch.randn(size)
    expected = net(x)
    state = {k: v.clone() for k, v in net.state_dict().items()}
    for affine in (True, False):
        model = undrift.perturb(net, norm_affine=affine, norm_statistics="source")
        torch.testing.assert_close(model(x), expected)
        assert all(p.requires_grad is affine for p in model.net.norm.parameters())
        model.remove()
    for statistics in ("batch", "moving"):
        model = undrift.perturb(net, norm_statistics=statistics)
        model(x).square().sum().backward()
        assert all(p.grad is not None for p in model.net.norm.parameters())
        model.remove()
    assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())


def test_tracked_instance_norm_follows_the_policy() -> None:
    x = 3 * torch.randn(3, 4, 9) + 2
    layer = nn.InstanceNorm1d(4, track_running_stats=True)
    net = network(layer)
    source = layer.running_mean.clone(), layer.running_var.clone()
    model = undrift.perturb(net, norm_statistics="batch")
    torch.testing.assert_close(model(x).mean(2), torch.zeros(3, 4), atol=1e-5, rtol=0)
    model.remove()
    model = undrift.perturb(net, norm_statistics="moving", norm_momentum=0.5)
    y = model(x)
    mean = (0.5 * source[0] + 0.5 * x.mean((0, 2))).view(1, 4, 1)
    var = (0.5 * source[1] + 0.5 * x.var(2).mean(0)).view(1, 4, 1)
    torch.testing.assert_close(y, (x - mean) / (var + layer.eps).sqrt())


def test_tied_norm_parameters_stay_tied() -> None:
    a, b = nn.LayerNorm(3), nn.LayerNorm(3)
    b.weight = a.weight
    net = nn.Sequential(nn.Linear(3, 3), a, b)
    model = undrift.perturb(net)
    assert net[1].weight is net[2].weight
    model.remove()
    assert net[1].weight is net[2].weight is a.weight


def test_norm_layers_called_by_keyword() -> None:
    class ByKeyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.conv = nn.BatchNorm2d(3), nn.Conv2d(3, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(self.norm(input=x))

    for statistics in ("source", "batch", "moving"):
        assert undrift.perturb(ByKeyword(), norm_statistics=statistics)(images()).shape == (6, 2, 8, 8)


def test_train_statistics_normalise_by_the_batch_in_a_step_and_by_the_average_at_rest() -> None:
    """As PyTorch's own train and eval modes do."""
    torch.manual_seed(0)
    layer, twin = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    x = torch.randn(5, 3, 4, 4) + 1
    model = undrift.perturb(nn.Sequential(layer), layers=(), norm_statistics="train")
    model.key.train()
    torch.testing.assert_close(model(x), twin.train()(x))
    torch.testing.assert_close(layer.running_mean, twin.running_mean)
    torch.testing.assert_close(layer.running_var, twin.running_var)
    with model.rest():
        torch.testing.assert_close(model(2 * x), twin.eval()(2 * x))
    assert torch.equal(model.remove()[0].running_mean, torch.zeros(3))  # type: ignore[index]


def test_statistics_that_are_not_finite_are_named_at_once() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.BatchNorm2d(4, track_running_stats=False))
    net[1].running_var[2] = torch.inf
    with pytest.warns(undrift.UndriftWarning, match=r"1\.running_var hold values that are not finite"):
        undrift.perturb(net).remove()
    undrift.perturb(net, norm_statistics="batch").remove()  # no warning: they are not looked at
    net[1].running_var[2] = 1e30
    undrift.perturb(net)
