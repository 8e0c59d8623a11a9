"""All log-variances as one row: the gradients that autograd adds up layer by layer, bit for bit, by one addition."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import undrift
from fused_support import kernels_device, numpys, triton
from undrift.kernels import dispatch
from undrift.kernels.triton import tiles
from undrift.posterior import log_var_row, noise
from undrift.posterior.perturbed import Perturbed

pytestmark = pytest.mark.usefixtures("how")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, padding=1)
        self.head, self.end = nn.Linear(4, 8), nn.Linear(8, 6)
        self.turns, self.again = 1, False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        for _ in range(self.turns):  # none: a layer that a pass leaves out
            x = checkpoint(self.body, x, use_reentrant=False) if self.again else self.body(x)
        out: Tensor = self.end(torch.tanh(self.head(x.flatten(2).transpose(1, 2).contiguous()))).mean(1)
        return out


def perturbed(device: torch.device) -> Perturbed:
    torch.manual_seed(0)
    model = undrift.perturb(Net().to(device), linear_sharing="kernel", init_fraction=0.3, first_energy="square")
    model.reseed(1)
    for _ in range(2):  # until its layers are known
        loss(model).backward()
    model.zero_grad()
    return model


def loss(model: Perturbed) -> Tensor:
    images = torch.rand(2, 3, 2, 3, generator=torch.Generator().manual_seed(2))
    return model(images.to(model.key.step.device)).square().sum()


def kl(model: Perturbed) -> Tensor:
    return undrift.kl(model, "sum")


def together(model: Perturbed) -> None:
    (loss(model) + kl(model)).backward()


def apart(model: Perturbed) -> None:
    value = loss(model)
    value.backward()
    kl(model).backward()
    kl(model).backward()


def divergence_first(model: Perturbed) -> None:
    (kl(model) + loss(model)).backward()


def two_divergences(model: Perturbed) -> None:
    value = loss(model)
    (kl(model) + value + kl(model)).backward()


def two_passes(model: Perturbed) -> None:
    value = loss(model)
    value.backward()
    (loss(model) + kl(model)).backward()


def kept(model: Perturbed) -> None:
    value = loss(model) + kl(model)
    value.backward(retain_graph=True)
    value.backward()


def some(model: Perturbed) -> None:
    chosen = [model.noises()[i].log_var for i in (2, 0)]
    value = loss(model) + kl(model)
    for log_var, grad in zip(chosen, torch.autograd.grad(value, chosen, retain_graph=True), strict=True):
        log_var.grad = grad
    value.backward()


def left_out(model: Perturbed) -> None:
    model.net.turns = 0
    loss(model).backward()


def left_out_of_the_pass_alone(model: Perturbed) -> None:
    model.net.turns = 0
    together(model)


def used_twice(model: Perturbed) -> None:
    model.net.turns = 2
    together(model)


def checkpointed(model: Perturbed) -> None:
    model.net.again = True
    together(model)


def replaced(model: Perturbed) -> None:
    value, held = loss(model), model.noises()[1]
    held.log_var = nn.Parameter(held.log_var.detach() + 1)
    (value + kl(model)).backward()


def moved(model: Perturbed) -> None:
    value = loss(model)
    value.backward()
    with torch.no_grad():
        model.noises()[1].log_var.add_(0.5)
    kl(model).backward()


def frozen(model: Perturbed) -> None:
    model.noises()[1].log_var.requires_grad_(False)
    together(model)


def never_differentiated(model: Perturbed) -> None:
    loss(model)
    with torch.no_grad():
        kl(model)
    together(model)


SCENES: list[Callable[[Perturbed], None]] = [
    together, apart, divergence_first, two_divergences, two_passes, kept, some, left_out, left_out_of_the_pass_alone,
    used_twice, checkpointed, replaced, moved, frozen, never_differentiated,
]  # fmt: skip


def on_kernels(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    for place in (noise, dispatch):
        monkeypatch.setattr(place, "quick", lambda _x, _y: True)
    monkeypatch.setattr(tiles, "processors", lambda _index: 1)
    return kernels_device(monkeypatch)


@triton
@numpys
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_the_gradients_that_autograd_adds_up(
    scene: Callable[[Perturbed], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, found, made = on_kernels(monkeypatch), [], []
    monkeypatch.setattr(
        log_var_row.Rows, "next", lambda self, own=log_var_row.Rows.next: made.append(own(self)) or made[-1]
    )
    for joined in (True, False):
        model = perturbed(device)
        made.clear()
        if not joined:
            model.key.rows = None
        for _ in range(2):
            scene(model)
        found.append({name: p.grad for name, p in model.named_parameters() if name.endswith("log_var")})
        assert any(row is not None for row in made) is (joined and scene is not frozen)
    assert any(grad is not None for grad in found[0].values())
    for name, grad in found[0].items():
        other = found[1][name]
        assert (grad is None and other is None) or torch.equal(grad, other), name


@triton
@numpys
def test_one_addition_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-variances have one gradient each, pieces of a row; a hook on one sees the sum."""
    model, seen = perturbed(on_kernels(monkeypatch)), []
    log_vars = [held.log_var for held in model.noises()]
    handle = log_vars[1].register_hook(lambda grad: seen.append(grad.clone()))
    together(model)
    handle.remove()
    starts = {v.grad.untyped_storage().data_ptr() for v in log_vars}
    assert len(starts) == 1
    assert seen[0].equal(log_vars[1].grad)


@triton
@numpys
def test_a_row_is_asked_for_as_long_as_its_pass_can_be_differentiated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then no longer: a CUDA graph moves log-variances without telling."""
    model = perturbed(on_kernels(monkeypatch))
    value = loss(model)
    assert model.key.last() is not None
    twin = copy.deepcopy(model)
    assert twin.key.last is None
    del value
    assert model.key.last() is None
    before = kl(model)
    for held in model.noises():
        held.log_var.data.add_(0.5)  # counted by nobody
    assert not torch.equal(kl(model), before)
    assert torch.equal(kl(twin), before)


@triton
@numpys
def test_after_a_backward_pass_the_divergence_is_that_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimiser's fused kernels move log-variances without a version."""
    model = perturbed(on_kernels(monkeypatch))
    value = loss(model) + kl(model)
    value.backward()
    for held in model.noises():
        held.log_var.data.add_(0.5)
    got = kl(model)
    del value
    assert torch.equal(got, kl(model))


@triton
@numpys
def test_a_hook_on_what_a_pass_leaves_out_is_given_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    model = perturbed(on_kernels(monkeypatch))
    model.net.turns = 0
    log_var = model.noise["body"].log_var
    log_var.register_hook(lambda grad: 2 * grad)
    loss(model).backward()
    assert not log_var.grad.any()
    assert model.noise["stem"].log_var.grad.any()


@triton
@numpys
def test_a_gradient_for_one_layer_goes_through_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """What two outputs share is freed with the first one's, unless its graph is kept: docs/gotchas.md says so."""
    model = perturbed(on_kernels(monkeypatch))
    first, log_var = loss(model), model.noise["end"].log_var
    again = first * 2
    torch.autograd.grad(first, log_var)
    with pytest.raises(RuntimeError, match="second time"):
        again.backward()
    first = loss(model)
    (kept,) = torch.autograd.grad(first, log_var, retain_graph=True)
    (first * 2).backward()
    torch.testing.assert_close(log_var.grad, 2 * kept)


@triton
@numpys
@pytest.mark.parametrize("where", ["", "head"])
def test_passes_for_other_tensors_in_the_middle_of_one(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook on a gradient asks for others', time and again: what layers have written so far stays."""
    model = perturbed(on_kernels(monkeypatch))
    x = torch.rand(2, 3, 2, 3, generator=torch.Generator().manual_seed(2)).to(model.key.step.device).requires_grad_()
    found, held = [], []
    model.net.head.register_forward_pre_hook(lambda _layer, args: held.append(args[0]))
    for asked in (0, 6):
        model.reseed(1)
        held.clear()
        for _ in range(2):
            out = model(x)

        parts = [out[0, place] for place in range(asked)]

        def ask(_grad: Tensor, parts: list[Tensor] = parts) -> None:
            while parts:  # once: these passes come by here, too
                torch.autograd.grad(parts.pop(), x, retain_graph=True)

        (held[-1] if where else out).register_hook(ask)
        model.zero_grad()
        (out.square().sum() + kl(model)).backward(retain_graph=True)
        found.append([noise.log_var.grad for noise in model.noises()])
    assert all(torch.equal(mine, want) for mine, want in zip(*found, strict=True))


@triton
@numpys
def test_a_pass_whose_gradient_nobody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise's gradients are then zeros, as those of other functions in Python."""

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, value: Tensor) -> Tensor:
            return value.clone()

        @staticmethod
        def backward(_ctx: Any, _grad: Tensor) -> None:
            return None

    model = perturbed(on_kernels(monkeypatch))
    Nothing.apply(model(torch.rand(2, 3, 2, 3).to(model.key.step.device))).sum().backward()
    assert all(noise.log_var.grad.eq(0).all() for noise in model.noises())


def test_a_perturbation_that_was_removed_is_freed_at_once() -> None:
    model = undrift.perturb(nn.Sequential(nn.Linear(3, 4)))
    held = weakref.ref(model.key)
    gc.disable()
    try:
        model.remove()
        del model
        assert held() is None
    finally:
        gc.enable()


@triton
@numpys
def test_a_second_derivative_is_the_divergences_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = perturbed(on_kernels(monkeypatch))
    log_vars = [held.log_var for held in model.noises()]
    value = loss(model)
    grads = torch.autograd.grad(kl(model), log_vars, create_graph=True)
    second = torch.autograd.grad(sum(g.sum() for g in grads), log_vars)
    assert all(grad.abs().max() > 0 for grad in second)
    grads = torch.autograd.grad(value + kl(model), log_vars, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        sum(g.sum() for g in grads).backward()


def test_which_log_variances_can_be_a_row() -> None:
    """Vectors that are trained, of one dtype, whose gradients begin at multiples of 16 bytes."""
    four, six = (nn.Parameter(torch.zeros(n)) for n in (4, 6))
    assert log_var_row.fits([four, six])
    assert not any(
        log_var_row.fits(others)
        for others in (
            [], [six, four], [four, None], [four, four.detach()], [four, nn.Parameter(torch.zeros(2, 2))],
            [four, nn.Parameter(torch.zeros(4).double())], [four, nn.Parameter(torch.zeros(4), requires_grad=False)],
        )
    )  # fmt: skip
