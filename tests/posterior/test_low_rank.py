"""A mean that moves in a low rank: the free step's projection, factors in the file, and no trace behind `remove`."""

import copy
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import undrift
from support import convnet, images, same, snapshot
from undrift.likelihood import Information, Teacher

PLAIN = {"train": "*", "norm_affine": False, "init_fraction": 0.0, "log_var_lr_scale": 0.0, "kl_weight": 0.0}
STEP = {"stream_optimiser": "sgd", "stream_lr": 0.5, "momentum": 0.0, "norm_statistics": "source"}


def wide() -> nn.Module:
    """Return a network whose weights, transposed, grouped and plain, are large enough to be factored."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.ConvTranspose2d(12, 16, 3, stride=2, groups=2),
        nn.Conv2d(16, 8, 3, groups=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    ).eval()


def exported(model: undrift.Perturbed) -> dict[str, Tensor]:
    """Return the state of the mean network, as other programs get it."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "net.safetensors")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", undrift.UndriftWarning)  # of statistics; weights are looked at here
            undrift.export(model, place)
        return load_file(place)


def weights(model: undrift.Perturbed) -> dict[str, Tensor]:
    return {n: p for n, p in exported(model).items() if p.ndim > 1}


def stepped(net: nn.Module, batches: int = 1, **options: object) -> undrift.Perturbed:
    torch.manual_seed(0)
    model = undrift.perturb(net, generator=torch.Generator().manual_seed(0), **PLAIN, **options)
    list(undrift.stream(model, [images(8, seed) for seed in range(batches)], Information()))
    return model


def test_the_change_starts_at_zero() -> None:
    net = wide()
    before = net(images())
    model = undrift.perturb(net, **PLAIN, mean_rank=2, norm_statistics="source")
    assert len(model.low_rank) == 4
    assert torch.equal(model(images()), before)


@pytest.mark.parametrize("start", ["kernel", "gradient"])
def test_a_step_is_the_free_one_projected(start: str) -> None:
    free, low = stepped(wide(), **STEP), stepped(wide(), **STEP, mean_rank=2, mean_start=start)
    source = dict(wide().named_parameters())
    for (layer, _, change), name in zip(low.changed, ["0.weight", "3.weight", "4.weight", "7.weight"], strict=True):
        moved = weights(free)[name] - source[name]
        if isinstance(layer, nn.ConvTranspose2d):  # a row per kernel
            moved = moved.unflatten(0, (layer.groups, -1)).transpose(1, 2).flatten(0, 1)
        moved = moved.flatten(1)
        span = change.right.detach()
        assert torch.allclose(change.rows().detach(), moved @ span.T @ span, atol=1e-5)
        if start == "gradient":  # no two directions hold more of the step
            assert torch.allclose(change.rows().norm(), torch.linalg.svdvals(moved)[:2].norm(), rtol=1e-3)


def test_a_rank_that_saves_nothing_is_free() -> None:
    free, low = stepped(wide(), 3, **STEP), stepped(wide(), 3, **STEP, mean_rank=13)
    assert not low.low_rank
    assert same(weights(free), weights(low))


def test_rank_zero_is_frozen() -> None:
    model = undrift.perturb(convnet(), train="*", mean_rank=0)
    frozen = undrift.perturb(convnet())
    assert [n for n, p in model.named_parameters() if p.requires_grad] == [
        n for n, p in frozen.named_parameters() if p.requires_grad
    ]


def test_adam_moves_a_weight_in_units_of_its_deviation() -> None:
    net = wide()
    source = {n: p.detach().clone() for n, p in net.named_parameters()}
    model = stepped(net, stream_optimiser="adam", weights_lr=0.1, mean_rank=2)
    for name, weight in weights(model).items():
        moved = (weight - source[name]).square().mean().sqrt() / source[name].std()
        assert 0.05 < float(moved) < 0.2  # the unit is rounded to a power of two


def test_the_kl_and_its_pull_are_those_of_the_sum() -> None:
    how = {"train": "*", "linear_sharing": "kernel", "kl_mean": "closed", "weight_decay": 0.0}
    low = undrift.perturb(wide(), **how, mean_rank=2)
    free = undrift.perturb(wide(), **how)
    with torch.no_grad():
        for change in low.changes():
            change.left.normal_()
        for name, weight in weights(low).items():
            free.net.get_parameter(name).copy_(weight)
    assert torch.allclose(undrift.kl(low), undrift.kl(free))
    for model in (low, free):
        undrift.adapt(model, images(8), lambda logits: 0 * logits.sum(), epochs=1, batch_size=8)
    expected = weights(free)
    assert all(torch.allclose(weight, expected[name], atol=1e-6) for name, weight in weights(low).items())


def test_removing_leaves_no_trace_even_where_a_pass_was_stopped() -> None:
    net = wide()
    before, hooks = snapshot(net), len(net[0]._forward_hooks)
    model = stepped(net, 2, mean_rank=2)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    handle = net[3].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        model(images())
    handle.remove()
    with model.off():
        assert same(snapshot(net), before)
    assert model.remove() is net
    assert same(snapshot(net), before)
    assert len(net[0]._forward_hooks) == hooks
    assert isinstance(net[0].weight, nn.Parameter)


def test_saved_and_loaded_it_predicts_the_same_from_a_smaller_file(tmp_path: Path) -> None:
    model, free = stepped(wide(), 2, mean_rank=2), stepped(wide(), 2)
    size = undrift.save(model, tmp_path / "low.safetensors")
    assert size < undrift.save(free, tmp_path / "free.safetensors")
    again = undrift.load(wide(), tmp_path / "low.safetensors")
    a, b = (undrift.predict(m, images(), samples=0).probs for m in (model, again))
    assert torch.equal(a, b)
    plain = wide()
    plain.load_state_dict(exported(again))
    assert torch.allclose(plain(images()).softmax(1), b, atol=1e-6)


@pytest.mark.parametrize("start", ["kernel", "gradient"])
def test_a_stream_goes_on_where_it_stood(start: str) -> None:
    how = {"method": "undrift", "mean_rank": 2, "mean_start": start, "views": "mirror", "seed": 0}

    def begin(batches: list[Tensor]) -> undrift.Stream:
        torch.manual_seed(0)
        return undrift.stream(wide(), batches, **how)

    x = [images(8, seed) for seed in range(4)]
    expected = list(begin(x))
    first = begin(x[:2])
    list(first)
    second = begin(x[2:])
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert all(torch.equal(a.probs, b.probs) for a, b in zip(second, expected[2:], strict=True))


def test_an_average_of_the_past_holds_factors() -> None:
    teacher = Teacher(memory=100, views=(), seed=0)
    model = undrift.perturb(wide(), train="*", mean_rank=2)
    s = undrift.stream(model, [images(8, seed) for seed in range(3)], teacher)
    list(s)
    own = weights(model)
    with teacher.deployed(model):
        lagging = weights(model)
    assert not same(own, lagging)
    assert same(own, weights(model))


def test_attention_moves_in_a_low_rank_too() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.norm, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.LayerNorm(8), None

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x + self.attention(x, x, x)[0]).mean(1)

    torch.manual_seed(0)
    net, x = Attending().eval(), torch.randn(4, 5, 8)
    before = net(x)
    model = undrift.perturb(net, train="*", mean_rank=2)
    list(undrift.stream(model, [x, x], Information(), lr=0.1))
    assert all(bool(change.left.any()) for change in model.changes())
    assert len(model.low_rank) == 2
    assert torch.equal(model.remove()(x), before)


def test_directions_are_found_under_autocast_too() -> None:
    with torch.autocast("cpu", torch.float16):  # in which there are no decompositions
        cast = undrift.perturb(wide(), **PLAIN, mean_rank=2)
    plain = undrift.perturb(wide(), **PLAIN, mean_rank=2)
    assert all(map(torch.equal, cast.changes()[0].parameters(), plain.changes()[0].parameters()))
