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
from torch.utils.checkpoint import checkpoint

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
@pytest.mark.parametrize("sharing", ["kernel", "weight"])  # with one variance per kernel, noise and KL share a row
def test_it_is_the_likelihood_and_the_divergence(
    likelihood: Callable[[Tensor], Tensor], reduction: str, sharing: str
) -> None:
    model = undrift.perturb(convnet(), init_fraction=0.04, kl_reduction=reduction, linear_sharing=sharing)
    model.reseed(1)
    parts = likelihood(model(images())) + undrift.kl_term(model, 50)
    want = gradients(parts, model)
    model.reseed(1)
    loss = undrift.step_loss(model, images(), 50, likelihood)
    assert torch.equal(loss, parts)
    near(gradients(loss, model), want, 0)


def raises(_layer: nn.Module, _args: object) -> None:
    raise RuntimeError("out of something")


def off(model: undrift.Perturbed) -> None:
    with model.off():
        undrift.step_loss(model, images(), 50)


def stopped(model: undrift.Perturbed) -> None:
    hook = model.net[-1].register_forward_pre_hook(raises)
    with pytest.raises(RuntimeError, match="out of something"):
        undrift.step_loss(model, images(), 50)
    hook.remove()


@pytest.mark.parametrize("before", [off, stopped])
def test_no_later_pass_has_the_log_variances_of_a_step_without_noise_or_end(
    before: Callable[[undrift.Perturbed], None],
) -> None:
    model = undrift.perturb(convnet(), init_fraction=0.04, linear_sharing="kernel")
    twin = copy.deepcopy(model)
    before(model)
    found = []
    for each in (model, twin):
        with torch.no_grad():
            for noise in each.noises():
                noise.log_var += 1
        each.reseed(1)
        found.append(each(images()))
    assert torch.equal(*found)


class Checkpointed(nn.Module):
    """A convnet whose body may be run again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.again = convnet(), False

    def forward(self, x: Tensor) -> Tensor:
        body, head = self.net[:6], self.net[6:]
        return head(checkpoint(body, x, use_reentrant=False) if self.again else body(x))


def test_a_checkpointed_part_gives_log_variances_the_same_gradients() -> None:
    model = undrift.perturb(Checkpointed(), init_fraction=0.04, linear_sharing="kernel")
    found = []
    for model.net.again in (False, True):
        model.reseed(1)
        found.append(gradients(undrift.step_loss(model, images(), 50), model))
    near(found[1], found[0], 1e-6)


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
    with pytest.raises(undrift.UndriftError, match="a KL needs a perturbed network"):
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
