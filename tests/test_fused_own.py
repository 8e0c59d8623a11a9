"""Whole networks whose noise runs their layers' own gradients: the longer way's gradients, whoever looks on."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize

import undrift
from fused_support import kernels_device, numpys, triton
from undrift import noise
from undrift.fused import layer
from undrift.fused.own import own_gradient


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 1)
        self.head, self.end = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(torch.tanh(self.stem(x))).flatten(2).transpose(1, 2)
        return self.end(torch.tanh(self.head(x.contiguous()))).mean(1)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.tensor(1.5))

    def forward(self, bias: Tensor) -> Tensor:
        return bias * self.by


def parametrized(net: Net) -> None:
    parametrize.register_parametrization(net.head, "bias", Scale())


Handle = Any
PROJECTION = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))


def project(module: nn.Module, _args: Any, output: Tensor) -> Tensor | None:
    """Put a product of the output in its place: a node of autograd like the layer's own."""
    return output @ PROJECTION.to(output.device) if getattr(module, "out_features", 0) == 6 else None


# What is done to a network first, options, what looks on while it runs, and how many layers run their own gradient.
SCENES: dict[str, tuple[Callable[[Net], None] | None, dict[str, Any], Callable[[Net], Handle] | None, int]] = {
    "as it is": (None, {}, None, 3),
    "a trained layer": (None, {"train": ("head",)}, None, 2),
    "a trained layer's bias, of a parametrization": (parametrized, {"train": ("head.parametrizations*",)}, None, 2),
    "another output in a layer's place": (
        None, {}, lambda net: net.head.register_forward_hook(project, prepend=True), 2
    ),
    "another output, by a hook on all modules": (None, {}, lambda _net: register_module_forward_hook(project), 0),
}  # fmt: skip


@triton
@numpys
@pytest.mark.parametrize("name", SCENES)
def test_gradients_are_the_longer_ways(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device, ran = kernels_device(monkeypatch), []
    monkeypatch.setattr(layer, "own_gradient", lambda *args: ran.append(args) or own_gradient(*args))
    before, options, looking, count = SCENES[name]
    found = []
    for quick in (True, False):
        monkeypatch.setattr(noise, "quick", lambda _x, _y, quick=quick: quick)
        torch.manual_seed(0)
        net = Net()
        if before is not None:
            before(net)
        model = undrift.perturb(net.to(device), linear_sharing="kernel", init_fraction=0.3, **options)
        model.reseed(1)
        handle = looking(net) if looking is not None else None
        out = model(torch.rand(2, 3, 5, 5, generator=torch.Generator().manual_seed(2)).to(device))
        out.square().sum().backward()
        if handle is not None:
            handle.remove()
        found.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
        assert len(ran) == (count if quick else 0)
        ran.clear()
    assert all(grad is not None for grad in found[1].values())
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-4)


@triton
@numpys
def test_an_output_that_was_kept_has_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    device, kept = kernels_device(monkeypatch), []
    monkeypatch.setattr(noise, "quick", lambda _x, _y: True)
    model = undrift.perturb(Net().to(device), linear_sharing="kernel", init_fraction=0.3)
    model.net.head.register_forward_hook(lambda _l, _a, output: kept.append(output), prepend=True)
    out = model(torch.rand(2, 3, 5, 5, device=device))
    (grad,) = torch.autograd.grad(out.square().sum(), kept[0])
    assert grad.abs().max() > 0
