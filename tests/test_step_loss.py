"""A step's loss in one function: what its parts add up to, compiled or not."""

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import undrift
from every_layer import Every
from fused_support import interpreter
from support import convnet, images


def gradients(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}


def near(got: dict[str, Tensor], want: dict[str, Tensor], most: float) -> None:
    """Each gradient is off by so much of its own size at most."""
    assert got.keys() == want.keys()
    for name, other in want.items():
        assert float((got[name] - other).norm()) <= most * float(other.norm()) + 1e-7, name


@pytest.mark.parametrize("likelihood", [undrift.entropy, undrift.Information()])
@pytest.mark.parametrize("reduction", ["bound", "mean"])
def test_it_is_the_likelihood_and_the_divergence(likelihood: Callable[[Tensor], Tensor], reduction: str) -> None:
    model = undrift.perturb(convnet(), init_fraction=0.04, kl_reduction=reduction)
    model.reseed(1)
    parts = likelihood(model(images())) + undrift.kl_term(model, 50)
    want = gradients(parts, model)
    model.reseed(1)
    loss = undrift.step_loss(model, images(), 50, likelihood)
    assert torch.equal(loss, parts)
    near(gradients(loss, model), want, 0)


class Wrapped(nn.Module):
    """Answers with a dictionary, as many do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = convnet()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.net(x)}


def test_it_takes_whatever_a_classifier_returns() -> None:
    model = undrift.perturb(Wrapped())
    assert undrift.step_loss(model, images(), 50).isfinite()


def test_compiled_on_a_cpu_it_is_the_same() -> None:
    model = undrift.perturb(convnet(), init_fraction=0.04)
    model.reseed(1)
    want = gradients(undrift.step_loss(model, images(), 50), model)
    model.reseed(1)
    torch._dynamo.reset()
    loss = torch.compile(lambda x: undrift.step_loss(model, x, 50), fullgraph=True, backend="aot_eager")(images())
    near(gradients(loss, model), want, 1e-4)


@pytest.mark.parametrize("call", [undrift.kl, undrift.kl_term, lambda net: undrift.step_loss(net, images(), 50)])
def test_a_network_that_is_not_perturbed_is_refused(call: object) -> None:
    with pytest.raises(undrift.UndriftError, match="belongs to a perturbation"):
        call(convnet())  # type: ignore[operator]


@pytest.mark.slow
@interpreter
def test_compiled_as_for_a_gpu_all_gradients_are_those_of_uncompiled_code() -> None:
    """In a process of its own, where compiled graphs have the operators of a GPU, and those run in the interpreter."""
    script = Path(__file__).with_name("support") / "compiled_as_for_a_gpu.py"
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("size", [1, 10**8])
@pytest.mark.filterwarnings("ignore")  # the compiler's own, of several kinds
def test_compiled_on_a_gpu_it_is_the_same(order: torch.memory_format, size: int) -> None:
    """Noise and KL give log-variances one gradient there: of few images the KL's is the larger, of many the noise's."""
    torch.manual_seed(0)
    net = Every().cuda().to(memory_format=order)  # type: ignore[call-overload]
    x = torch.rand(8, 3, 16, 16, device="cuda").to(memory_format=order)
    model = undrift.perturb(net, init_fraction=0.04, linear_sharing="kernel", norm_statistics="batch").eval()
    with torch.backends.cudnn.flags(allow_tf32=False):
        twin = copy.deepcopy(model)
        for each in (model, twin):
            each.reseed(1)
        want = gradients(undrift.step_loss(twin, x, size), twin)
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: undrift.step_loss(model, x, size), fullgraph=True)
        got = gradients(compiled(x), model)
    assert all(f"noise.{name}.log_var" in got for name in ("stem", "grouped", "odd", "up", "down", "head"))
    near(got, want, 5e-3)
