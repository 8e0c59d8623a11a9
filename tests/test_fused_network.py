"""A whole network whose noise is made by Triton's kernels, against PyTorch's operators, whatever a user does with it.

On a GPU, or in Triton's interpreter (TRITON_INTERPRET=1).
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import undrift
from fused_support import kernels_device, numpys, triton
from undrift import Perturbed
from undrift.kernels import force

pytestmark = [triton, numpys]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Net(nn.Module):
    """Images less their mean, a checkpoint that may be on, groups, a layer that may be left out, one token of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 3, padding=1)
        self.grouped = nn.Conv2d(6, 6, 3, padding=1, groups=3)
        self.head, self.end = nn.Linear(6, 6), nn.Linear(6, 4)
        self.again, self.turns = False, 1

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        for _ in range(self.turns):
            x = checkpoint(self.body, x, use_reentrant=False) if self.again else self.body(x)
        x = self.head(torch.tanh(self.grouped(x)).flatten(2).transpose(1, 2))
        return self.end(torch.tanh(x)[:, 1])


def step(model: Perturbed, batch: int = 2) -> list[Tensor | None]:
    """Return the output of a pass and all gradients."""
    x = torch.rand(batch, 3, 4, 4, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    out = model(x)
    if out.requires_grad:
        (out.square().sum() + undrift.kl(model, "sum")).backward()
    found = [out.detach(), *(p.grad for p in model.parameters())]
    model.zero_grad()
    return found


class Above(nn.Module):
    """No log-variance below −20."""

    def forward(self, log_var: Tensor) -> Tensor:
        return log_var.clamp(min=-20)


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def replaced(model: Perturbed) -> None:
    held = model.noises()[1]
    held.log_var = nn.Parameter(held.log_var.detach() + 1)


def frozen(model: Perturbed) -> None:
    model.noises()[2].log_var.requires_grad_(False)


def parametrized(model: Perturbed) -> None:
    parametrize.register_parametrization(model.noises()[1], "log_var", Above())


def reflected(model: Perturbed) -> None:
    body = model.net.body
    body.padding_mode, body._reversed_padding_repeated_twice = "reflect", [1, 1, 1, 1]


def strided(model: Perturbed) -> None:
    model.net.body.stride = (2, 2)


def looked_on(model: Perturbed) -> None:
    model.net.head.register_forward_hook(lambda _layer, _args, output: 2 * output, prepend=True)


def trained(model: Perturbed) -> None:
    model.net.head.weight.requires_grad_()


def checkpointed(model: Perturbed) -> None:
    model.net.again = True


def used_twice(model: Perturbed) -> None:
    model.net.turns = 2


def left_out(model: Perturbed) -> None:
    model.net.turns = 0


@contextmanager
def mean(model: Perturbed) -> Any:
    with model.mean():
        yield


Around = Callable[[Perturbed], AbstractContextManager[object]]
# What is done to a network between two passes, around the second one, and how many images that has.
CHANGES: dict[str, tuple[Callable[[Perturbed], object] | None, Around | None, int]] = {
    "nothing": (None, None, 2),
    "a smaller batch": (None, None, 1),
    "other log-variances": (replaced, None, 2),
    "frozen log-variances": (frozen, None, 2),
    "log-variances that are made of others": (parametrized, None, 2),
    "another padding": (reflected, None, 2),
    "another stride": (strided, None, 2),
    "a hook that comes first": (looked_on, None, 2),
    "weights that are trained": (trained, None, 2),
    "a checkpoint": (checkpointed, None, 2),
    "a layer used twice": (used_twice, None, 2),
    "a layer left out": (left_out, None, 2),
    "a copy": (copy.deepcopy, None, 2),
    "no gradients": (None, lambda _model: torch.no_grad(), 2),
    "inference": (None, lambda _model: torch.inference_mode(), 2),
    "no noise": (None, mean, 2),
    "somebody who sees all operators": (None, lambda _model: Watching(), 2),
    "autocast": (None, lambda _model: torch.autocast(DEVICE.type, torch.bfloat16), 2),
}
QUICK = ("nothing", "a checkpoint")


@pytest.mark.parametrize("energy", ["square", pytest.param("offset", marks=pytest.mark.slow), "centred"])
@pytest.mark.parametrize("name", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CHANGES])
def test_kernels_do_what_operators_do(name: str, energy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels_device(monkeypatch)
    change, around, batch = CHANGES[name]
    found = []
    for path in ("triton", "plain"):
        torch.manual_seed(0)
        model = undrift.perturb(Net().to(DEVICE), linear_sharing="kernel", init_fraction=0.3, first_energy=energy)
        model.reseed(1)
        with force(path):  # type: ignore[arg-type]
            step(model)
            changed = None if change is None else change(model)
            model = changed if isinstance(changed, Perturbed) else model
            with nullcontext() if around is None else around(model):
                second = step(model, batch)
            found.append([*second, *step(model)])
    near = 5e-2 if name == "autocast" else 1e-3
    for mine, others in zip(*found, strict=True):
        assert (mine is None) == (others is None)
        if mine is not None:
            torch.testing.assert_close(mine, others, rtol=near, atol=near)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["nothing", "another stride", "a hook that comes first", "weights that are trained", "a checkpoint"]
)
def test_a_recording_has_the_same_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There the noise's node has a frozen convolution's own gradient, too."""
    monkeypatch.setattr("undrift.posterior.noise.capturing", lambda _: True)
    test_kernels_do_what_operators_do(name, "square", monkeypatch)


def test_a_second_derivative_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the noise; the KL has one."""
    kernels_device(monkeypatch)
    model = undrift.perturb(Net().to(DEVICE), linear_sharing="kernel", init_fraction=0.3)
    log_vars = [held.log_var for held in model.noises()]
    with force("triton"):
        grads = torch.autograd.grad(
            model(torch.rand(2, 3, 4, 4).to(DEVICE)).square().sum(), log_vars, create_graph=True
        )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        sum(g.sum() for g in grads).backward()
