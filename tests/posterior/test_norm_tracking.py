"""Policy "train": a batch norm moves its own statistics, at the policy's pace, and nothing else of it changes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import undrift
from faults import interrupted, recorded_in_a_graph

PACE = 0.3


def perturbed(*parts: nn.Module, pace: float = PACE) -> undrift.Perturbed:
    return undrift.perturb(nn.Sequential(*parts), layers=(), norm_statistics="train", norm_momentum=pace).train()


def kept(layer: nn.Module) -> list[Tensor]:
    return [layer.running_mean, layer.running_var]


def moved(old: list[Tensor], x: Tensor) -> list[Tensor]:
    var, mean = torch.var_mean(x.double(), dim=(0, *range(2, x.ndim)))
    return [a.double().lerp(b, PACE).to(a.dtype) for a, b in zip(old, (mean, var), strict=True)]


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.SyncBatchNorm])
def test_statistics_move_at_the_pace_of_the_policy(kind: type[nn.Module], momentum: float | None) -> None:
    layer, x = kind(3, momentum=momentum), torch.randn(5, 3, 4, 4) + 2
    model = perturbed(layer)
    layer.eval()
    old, count = kept(layer), layer.num_batches_tracked
    values = [each.clone() for each in old]
    model(x)
    torch.testing.assert_close(kept(layer), moved(values, x))
    assert all(torch.equal(a, b) for a, b in zip(old, values, strict=True)), "an earlier pass may still need them"
    assert layer.num_batches_tracked is count
    assert count == 0
    assert (layer.momentum, layer.training, layer.track_running_stats) == (momentum, False, True)
    assert list(layer._buffers) == ["running_mean", "running_var", "num_batches_tracked"]


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_no_second_pass_over_the_input() -> None:
    model = perturbed(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
    with Operators() as operators:
        model(torch.randn(5, 3, 4, 4)).sum().backward()
    assert sum("batch_norm" in name and "backward" not in name for name in operators.seen) == 1
    assert "var_mean" not in operators.seen


HALF, BRAIN, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("inputs", "statistics", "affine", "once"),
    [
        (HALF, HALF, HALF, True),
        (HALF, SINGLE, SINGLE, True),
        (HALF, SINGLE, HALF, False),
        (BRAIN, BRAIN, BRAIN, True),
        (BRAIN, SINGLE, SINGLE, True),
        (BRAIN, SINGLE, BRAIN, False),
        (SINGLE, SINGLE, SINGLE, True),
        (SINGLE, DOUBLE, SINGLE, False),
        (SINGLE, HALF, SINGLE, False),
        (DOUBLE, DOUBLE, DOUBLE, True),
    ],
)
def test_dtypes(inputs: torch.dtype, statistics: torch.dtype, affine: torch.dtype, once: bool) -> None:
    """What PyTorch refuses to do in one, is done in two."""
    layer, x = nn.BatchNorm2d(3).to(affine), (torch.randn(5, 3, 4, 4) + 2).to(inputs)
    layer.running_mean, layer.running_var = (each.to(statistics) for each in kept(layer))
    model, old = perturbed(layer), kept(layer)
    with Operators() as operators:
        y = model(x)
    assert y.dtype == inputs
    assert ("var_mean" not in operators.seen) is once
    tolerance = {HALF: 2e-3, BRAIN: 1e-2}.get(statistics, 1e-6)
    torch.testing.assert_close(kept(layer), moved(old, x), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_broken_image_does_not_stay(poison: float, layout: torch.memory_format) -> None:
    layer, x = nn.BatchNorm2d(3), torch.randn(5, 3, 4, 4) + 5
    model, old = perturbed(layer), kept(layer)
    x[0, 1, 0, 0] = poison
    model(x.to(memory_format=layout))
    for before, now in zip(old, kept(layer), strict=True):
        assert (before == now).tolist() == [False, True, False]


def own_state(layer: nn.Module) -> list[Any]:
    return [*map(id, layer._buffers.values()), layer.momentum, layer.training, layer.track_running_stats]


def fail(*_: Any) -> None:
    raise ValueError("after the policy's own hook")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda layer: layer.register_forward_pre_hook(fail),
        lambda layer: setattr(layer, "weight", nn.Parameter(torch.ones(2))),
    ],
)
def test_a_pass_that_raises_leaves_all_as_it_was(spoil: Callable[[nn.Module], Any]) -> None:
    layer = nn.BatchNorm2d(3)
    model = perturbed(layer)
    before = own_state(layer.eval())
    spoil(layer)
    with pytest.raises((ValueError, RuntimeError), match=r"own hook|weight"):
        model(torch.randn(5, 3, 4, 4))
    assert own_state(layer) == before


@pytest.mark.parametrize("where", ["torch.nn.functional.batch_norm", "undrift.posterior.norm.Tracking.begin"])
def test_a_pass_that_is_interrupted_leaves_all_as_it_was(where: str) -> None:
    """PyTorch calls no hook then."""
    layer = nn.BatchNorm2d(3)
    model = perturbed(layer)
    before = own_state(layer.eval())
    with interrupted(where), pytest.raises(KeyboardInterrupt):
        model(torch.randn(5, 3, 4, 4))
    assert own_state(layer) == before


def test_an_interrupted_pass_of_the_plain_network_is_not_in_a_file(tmp_path: Path) -> None:
    layer = nn.BatchNorm2d(3)
    model = perturbed(layer)
    before = own_state(layer.eval())
    with interrupted("torch.nn.functional.batch_norm"), pytest.raises(KeyboardInterrupt):
        model.net(torch.randn(5, 3, 4, 4))
    undrift.save(model, tmp_path / "b.safetensors")
    assert "num_batches_tracked" in undrift.inspect(tmp_path / "b.safetensors").tensors
    assert own_state(layer) == before


class Ghost(nn.BatchNorm2d):
    """Normalises each half of a batch by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([super(Ghost, self).forward(half) for half in x.chunk(2)])


class Counting(nn.BatchNorm2d):
    """Counts for itself."""

    def forward(self, x: Tensor) -> Tensor:
        self.num_batches_tracked += 1
        return super().forward(x)


@pytest.mark.parametrize("kind", [Ghost, Counting])
def test_what_another_forward_does_with_averages_is_not_relied_on(kind: type[nn.BatchNorm2d]) -> None:
    layer, x = kind(3), torch.randn(6, 3, 4, 4) + 2
    model, old = perturbed(layer), kept(layer)
    model(x)
    torch.testing.assert_close(kept(layer), moved(old, x))


class Blocks(nn.Module):
    """Two checkpointed blocks; the first ends with its norm layer, where a second run may stop before it is through."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)) for _ in range(2))

    def forward(self, x: Tensor, again: bool | None) -> Tensor:
        for part in (self.a, nn.Sequential(self.b, nn.Tanh())):
            x = part(x) if again is None else checkpoint(part, x, use_reentrant=again)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("forwards", [1, 2])
def test_a_checkpoint_moves_statistics_once(reentrant: bool, forwards: int) -> None:
    found = []
    for again in (None, reentrant):
        torch.manual_seed(0)
        net = Blocks()
        model = undrift.perturb(net, generator=torch.Generator().manual_seed(1), norm_statistics="train").train()
        x = torch.randn(5, 3, 4, 4, requires_grad=True)
        loss = sum(model(x, again).square().sum() for _ in range(forwards))
        after = [each for part in (net.a, net.b) for each in kept(part[1])]
        loss.backward()
        now = [each for part in (net.a, net.b) for each in kept(part[1])]
        assert all(a is b for a, b in zip(after, now, strict=True))
        assert not any(part[1].momentum != 0.1 or part[1].num_batches_tracked is None for part in (net.a, net.b))
        found.append([*now, x.grad, *(p.grad for p in model.parameters() if p.requires_grad)])
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)


def test_a_captured_graph_keeps_its_tensors() -> None:
    layer, x = nn.BatchNorm2d(3), torch.randn(5, 3, 4, 4)
    model, old = perturbed(layer), kept(layer)
    values = [each.clone() for each in old]
    with recorded_in_a_graph():
        y = model(x)
        assert all(a is b for a, b in zip(kept(layer), old, strict=True))
        torch.testing.assert_close(old, moved(values, x))
        model(x)
    y.sum().backward()  # the first pass saved no tensor that the second one wrote to


def test_inference_mode_leaves_tensors_to_train_with() -> None:
    layer, x = nn.BatchNorm2d(3), torch.randn(5, 3, 4, 4)
    model, old = perturbed(layer), kept(layer)
    with torch.inference_mode():
        model(x)
    torch.testing.assert_close(kept(layer), moved(old, x))
    assert not any(each.is_inference() for each in kept(layer))
    model(x).sum().backward()
    with model.rest():
        model(x).sum().backward()
    assert layer.weight.grad is not None
