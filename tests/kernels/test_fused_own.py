"""Noise whose node of autograd runs its layer's own: the longer way's gradients, whoever looks on."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize

import undrift
from fused_support import KEY, kernels_device, numpys, triton
from undrift.kernels.triton import layer
from undrift.kernels.triton.own import alone, own_gradient, own_of
from undrift.posterior import noise

LAST = torch.channels_last
OWN = {
    "3×3": (nn.Conv2d(6, 8, 3, padding=1), (2, 6, 5, 7)),
    "1×1 strided": (nn.Conv2d(6, 10, 1, stride=3, bias=False), (2, 6, 8, 5)),
    "patches": (nn.Conv2d(3, 8, 4, stride=4), (2, 3, 8, 13)),
    "vectors": (nn.Linear(6, 10), (5, 6)),
    "tokens": (nn.Linear(7, 14), (2, 5, 7)),
    "tokens without bias": (nn.Linear(7, 14, bias=False), (2, 5, 7)),
    "a field of vectors": (nn.Linear(5, 12), (2, 3, 2, 5)),
}


class Owned:
    """A frozen layer behind another operation, with its noise."""

    def __init__(self, name: str, device: torch.device, order: torch.memory_format = torch.contiguous_format) -> None:
        module, shape = OWN[name]
        self.module = copy.deepcopy(module).to(device).requires_grad_(False)
        spec, draw = layer.spec_of(self.module, 0.25)[0], torch.Generator().manual_seed(0)
        assert spec is not None
        self.spec, self.key = spec, KEY.to(device)
        self.start = torch.randn(shape, generator=draw).to(device).contiguous(memory_format=order)
        self.log_var = torch.randn(len(module.weight), generator=draw).to(device)
        self.seen: list[Tensor] = []

    def run(self, fold: bool, hook: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Return input, log-variances, and noisy output; with `fold` the noise's node runs the layer's."""
        x, log_var = self.start.clone().requires_grad_(), self.log_var.clone().requires_grad_()
        inner = torch.tanh(x)
        y = self.module(inner)
        if hook:
            y.register_hook(self.seen.append)
        return x, log_var, self.noisy(inner, y, log_var, fold)

    def noisy(self, x: Tensor, y: Tensor, log_var: Tensor, fold: bool) -> Tensor:
        """Return the layer's output y with its noise."""
        plan = layer._make(x, y, log_var, 2, self.spec)
        assert plan is not None
        assert plan.pulls is not None
        return layer.noisy(x, y, log_var, self.key, plan, fold)


@triton
@numpys
@pytest.mark.parametrize("name", OWN)
def test_the_layers_own_gradient_is_added_by_the_same_node(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same gradients as where autograd adds them up, and again where the graph is kept."""
    device, ran = kernels_device(monkeypatch), []
    monkeypatch.setattr(layer, "own_gradient", lambda *args: ran.append(args) or own_gradient(*args))
    orders = [torch.contiguous_format] if isinstance(OWN[name][0], nn.Linear) else [torch.contiguous_format, LAST]
    for order in orders:
        setting = Owned(name, device, order)
        found = []
        for fold in (True, False):
            x, log_var, out = setting.run(fold)
            for again in (True, True, False):  # the first launch of a kernel writes elsewhere than in place
                x.grad = log_var.grad = None
                out.square().sum().backward(retain_graph=again)
            found.append((out.detach(), x.grad, log_var.grad))
            assert len(ran) == (3 if fold else 0)
            ran.clear()
        assert found[0][1].abs().max() > 0.1
        for mine, others in zip(*found, strict=True):
            torch.testing.assert_close(mine, others, rtol=1e-4, atol=1e-4)


@triton
@numpys
@pytest.mark.parametrize("name", ["3×3", "tokens"])
def test_a_layers_own_gradient_is_left_to_autograd_where_somebody_waits_for_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = Owned(name, kernels_device(monkeypatch))
    x, log_var, out = setting.run(True)
    (alone,) = torch.autograd.grad(out.sum(), log_var, retain_graph=True)  # nobody asks for x
    out.sum().backward()
    torch.testing.assert_close(alone, log_var.grad)
    hooked, _, out = setting.run(True, hook=True)
    out.sum().backward()
    assert len(setting.seen) == 1
    assert setting.seen[0].equal(torch.ones_like(out))
    torch.testing.assert_close(hooked.grad, x.grad)


@triton
@numpys
@pytest.mark.parametrize("name", OWN)
def test_a_backward_pass_for_some_tensors_only(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd has then not met the views and casts between a layer's product and its input."""
    setting = Owned(name, kernels_device(monkeypatch))
    low = torch.device("cuda" if torch.cuda.is_available() else "cpu").type
    for cast in (False, True):
        found = []
        for fold in (True, False):
            with torch.autocast(low, torch.bfloat16, enabled=cast):
                x, log_var, out = setting.run(fold)
            found.append(torch.autograd.grad(out.float().square().sum(), (x, log_var), retain_graph=True))
            (alone,) = torch.autograd.grad(out.float().square().sum(), x)
            assert alone.equal(found[-1][0])
            assert alone.abs().max() > 0.1
        near = 2e-1 if cast else 1e-4
        torch.testing.assert_close(*found, rtol=near, atol=near)


@triton
@numpys
def test_a_layers_own_node_is_let_go_with_what_it_has_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the backward pass, as autograd does: it would hold the layer's input until the loss is forgotten."""
    x, _, out = Owned("tokens", kernels_device(monkeypatch)).run(True)
    node = out.grad_fn
    assert [type(edge[0]).__name__ for edge in node.next_functions] == ["TanhBackward0", "AccumulateGrad"]
    out.sum().backward(retain_graph=True)
    assert node.own is not None
    before = x.grad.clone()
    out.sum().backward()
    assert node.own is None
    torch.testing.assert_close(x.grad, 2 * before)
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()


def test_which_nodes_are_a_layers_own() -> None:
    """Those of a product: no other function's, no leaf's, and none whose output somebody waits for."""
    x = torch.rand(2, 3, 4, requires_grad=True)
    linear = nn.Linear(4, 5).requires_grad_(False)
    assert type(own_of(linear(x))).__name__ == "AddmmBackward0"
    assert [own_of(y) for y in (x, x * 2, x.view(6, 4), linear(x.detach()))] == [None] * 4
    kept = linear(x)
    kept.retain_grad()
    assert own_of(kept) is None


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


@triton
@numpys
@pytest.mark.parametrize("name", ["tokens", "vectors", "3×3"])
@pytest.mark.parametrize("leaf", [True, False])
def test_a_gradient_for_some_tensors_calls_hooks_once(name: str, leaf: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.autograd.grad for a layer's input that nothing came before, or for what came before it."""
    setting, found = Owned(name, kernels_device(monkeypatch)), []
    for fold in (True, False):
        x, log_var, seen = setting.start.clone().requires_grad_(), setting.log_var.clone().requires_grad_(), []
        given = x if leaf else torch.tanh(x)
        given.register_hook(lambda grad, seen=seen: seen.append(grad) or 2 * grad)
        out = setting.noisy(given, setting.module(given), log_var, fold)
        (grad,) = torch.autograd.grad(out.square().sum(), x)
        assert len(seen) == 1
        found.append(grad)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_a_forward_method_of_the_layers_own_is_not_the_layers() -> None:
    module = nn.Linear(3, 4).requires_grad_(False)
    model = undrift.perturb(nn.Sequential(module), linear_sharing="kernel")
    (held,) = model.noises()
    assert alone(module, held)
    own = module.forward
    module.forward = lambda x: own(2 * x)  # type: ignore[method-assign]
    assert not alone(module, held)
