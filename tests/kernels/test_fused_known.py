"""A layer as it was met last: its next pass looks nothing up, and whatever has changed since is seen."""

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import undrift
from fused_support import kernels_device, numpys, triton, use
from undrift.kernels import dispatch
from undrift.kernels.triton import layer, tiles
from undrift.posterior import noise, tensor_guard
from undrift.posterior.perturbed import Perturbed

both = pytest.mark.usefixtures("how")  # native and in Python


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 3, padding=1)
        self.head, self.end = nn.Linear(6, 6), nn.Linear(6, 4)
        self.again = False

    def forward(self, x: Tensor) -> Tensor:
        inner = self.stem(x)
        inner = checkpoint(self.middle, inner, use_reentrant=False) if self.again else self.middle(inner)
        out: Tensor = self.end(torch.tanh(self.head(inner.flatten(2).transpose(1, 2).contiguous()))).mean(1)
        return out

    def middle(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(torch.tanh(x))
        return out


def perturbed(device: torch.device) -> Perturbed:
    torch.manual_seed(0)
    model = undrift.perturb(Net().to(device), linear_sharing="kernel", init_fraction=0.3, first_energy="square")
    model.reseed(1)
    return model


def images(device: torch.device, batch: int = 2) -> Tensor:
    return torch.rand(batch, 3, 5, 5, generator=torch.Generator().manual_seed(2)).to(device)


def step(model: Perturbed, batch: int = 2) -> list[Tensor | None]:
    """Return the output of a pass and all gradients."""
    out = model(images(model.key.step.device, batch))
    if out.requires_grad:
        (out.square().sum() + undrift.kl(model, "sum")).backward()
    found = [out.detach(), *(p.grad for p in model.parameters())]
    model.zero_grad()
    return found


def replace(model: Perturbed) -> None:
    held = model.noises()[1]
    held.log_var = nn.Parameter(held.log_var.detach() + 1)


class Above(nn.Module):
    """No log-variance below −20."""

    def forward(self, log_var: Tensor) -> Tensor:
        return log_var.clamp(min=-20)


def bound(model: Perturbed) -> None:
    parametrize.register_parametrization(model.noises()[1], "log_var", Above())


def reflect(model: Perturbed) -> None:
    body = model.net.body
    body.padding_mode, body._reversed_padding_repeated_twice = "reflect", [1, 1, 1, 1]


def see(model: Perturbed) -> None:
    model.net.head.register_forward_hook(lambda _layer, _args, output: 2 * output, prepend=True)


def train(model: Perturbed) -> None:
    model.net.head.weight.requires_grad_()


def repeat(model: Perturbed) -> None:
    model.net.again = True


@contextmanager
def mean(model: Perturbed) -> Iterator[None]:
    with model.mean():
        yield


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


# What is done to a network between two passes, around the second one, and how many images that has.
CHANGES: dict[str, tuple[Callable[[Perturbed], object] | None, Callable[[Perturbed], Any] | None, int]] = {
    "nothing": (None, None, 2),
    "a smaller batch": (None, None, 1),
    "other log-variances": (replace, None, 2),
    "frozen log-variances": (lambda model: model.noises()[2].log_var.requires_grad_(False), None, 2),
    "log-variances that are made of others": (bound, None, 2),
    "another padding": (reflect, None, 2),
    "a hook that comes first": (see, None, 2),
    "weights that are trained": (train, None, 2),
    "a checkpoint": (repeat, None, 2),
    "another seed": (lambda model: model.reseed(5), None, 2),
    "no gradients": (None, lambda _model: torch.no_grad(), 2),
    "inference": (None, lambda _model: torch.inference_mode(), 2),
    "no noise": (None, mean, 2),
    "noise by PyTorch's operators": (None, lambda _model: dispatch.force("plain"), 2),
    "somebody who sees all operators": (None, lambda _model: Watching(), 2),
    "autocast": (None, lambda model: torch.autocast(model.key.step.device.type, torch.bfloat16), 2),
}


def on_kernels(monkeypatch: pytest.MonkeyPatch, quickly: bool = True) -> torch.device:
    """Let a layer's noise be one node of autograd, on a CPU too."""

    def quick(_x: Tensor, _y: Tensor) -> bool:
        return quickly and dispatch._forced[-1] in dispatch._QUICK and torch._C._len_torch_dispatch_stack() == 0

    monkeypatch.setattr(noise, "quick", quick)
    monkeypatch.setattr(tiles, "processors", lambda _index: 1)
    return kernels_device(monkeypatch)


@triton
@numpys
@both
@pytest.mark.parametrize("name", CHANGES)
def test_what_has_changed_since_the_last_pass_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, around, batch = CHANGES[name]
    found = []
    for quickly in (True, False):
        model = perturbed(on_kernels(monkeypatch, quickly))
        for _ in range(2):
            step(model)
        assert all((held._known is not None) is quickly for held in model.noises())
        if change is not None:
            change(model)
        with nullcontext() if around is None else around(model):
            second = step(model, batch)
        found.append([*second, *step(model)])
    near = 5e-2 if name == "autocast" else 1e-3
    for mine, others in zip(*found, strict=True):
        assert (mine is None) == (others is None)
        if mine is not None:
            torch.testing.assert_close(mine, others, rtol=near, atol=near)


@triton
@numpys
@both
def test_a_second_pass_looks_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    device, asked = on_kernels(monkeypatch), []
    monkeypatch.setattr(noise, "plan_of", lambda *args: asked.append(args) or layer.plan_of(*args))
    model = perturbed(device)
    for count in (4, 4, 0, 0):  # the first pass finds out which layers are called
        step(model)
        assert len(asked) == count
        asked.clear()
    step(model, 1)
    assert len(asked) == 4


@triton
@numpys
def test_a_pytorch_without_such_guards_looks_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    use("python", monkeypatch)  # native ones are guarded by themselves
    device, found = on_kernels(monkeypatch), []

    def refuse(*_tensors: Tensor, **_dims: Any) -> None:
        raise TypeError("takes other arguments")

    for guards in (tensor_guard._guards, None, refuse):
        monkeypatch.setattr(tensor_guard, "_guards", guards)
        model = perturbed(device)
        found.append([each for _ in range(3) for each in step(model)])
        assert (model.noises()[0]._known is None) is (len(found) > 1)
    for others in found[1:]:
        assert all((a is None and b is None) or a.equal(b) for a, b in zip(found[0], others, strict=True))


@triton
@numpys
def test_copies_know_their_own_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    use("native", monkeypatch)
    model = perturbed(on_kernels(monkeypatch))
    for _ in range(2):
        step(model)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    want = [each for _ in range(3) for each in step(model)]
    for twin in copies:
        assert all(held._known is None for held in twin.noises())
        got = [each for _ in range(3) for each in step(twin)]
        assert all((a is None and b is None) or a.equal(b) for a, b in zip(want, got, strict=True))
        assert all(held._known.layer() in set(twin.modules()) for held in twin.noises())


def test_likeness() -> None:
    """Sizes, strides, dtype, device, gradients, class, and what a transform wraps."""
    x = torch.rand(2, 3)
    alike = tensor_guard.likeness(x)
    if alike is None:
        pytest.skip("this PyTorch has no such guards")
    assert alike(torch.rand(2, 3))
    assert not any(
        alike(other)
        for other in (
            torch.rand(3, 2), torch.rand(3, 2).t(), torch.rand(2, 3).double(), torch.rand(2, 3).requires_grad_(),
            nn.Parameter(torch.rand(2, 3)), torch.rand(2, 3, device="meta"),
        )
    )  # fmt: skip
    seen: list[bool] = []
    torch.vmap(lambda row: seen.append(alike(row)) or row)(torch.rand(4, 2, 3))
    with FakeTensorMode():
        seen.append(alike(torch.rand(2, 3)))
    assert seen == [False] * 2
