"""Whole networks in half precision and under autocast.

In a process of its own: some CPUs announce matrix instructions for bfloat16 that they cannot run, and what oneDNN may
use must be said before PyTorch is imported.
"""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import itertools
import torch
import undrift
from support import convnet, images


def check(how, dtype, estimator):
    net = convnet().eval()
    x = images()
    if how == "weights":
        net, x = net.to(dtype), x.to(dtype)

    def run(call):
        with torch.autocast("cpu", dtype, enabled=how == "autocast"):
            return call(x)

    source = run(net)
    model = undrift.perturb(net, estimator=estimator, init_fraction=0.1, norm_statistics="batch")
    y = run(model)
    assert y.dtype == source.dtype == dtype, (y.dtype, source.dtype)
    assert torch.isfinite(y).all() and not torch.equal(y, source)
    (y.float().square().mean() + undrift.kl(model)).backward()
    for parameter in model.parameters():
        if parameter.requires_grad:
            assert torch.isfinite(parameter.grad).all()
    assert all(n.log_var.dtype == torch.float32 for n in model.noises())
    with model.off():
        assert torch.equal(run(net), source)
    assert torch.equal(run(model.remove()), source)
    print(how, dtype, estimator)


cases = [("autocast", torch.bfloat16), ("autocast", torch.float16), ("weights", torch.bfloat16)]
for (how, dtype), estimator in itertools.product(cases, ["local", "drawn"]):
    check(how, dtype, estimator)
"""

LINEAR = """
import torch
from torch import nn
import undrift


class Normed(nn.Module):
    # a linear layer behind a layer norm, whose output is float32 under autocast; called by a keyword

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 6)

    def forward(self, x):
        return self.linear(input=self.norm(x))


for estimator in ("local", "drawn"):
    net, x, seen = Normed(), torch.rand(4, 5, 8), []
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        want = net(x)
    model = undrift.perturb(net, estimator=estimator, linear_sharing="kernel", init_fraction=0.1)
    net.linear.register_forward_hook(lambda l, a, kwargs, o: seen.append(kwargs["input"].dtype), with_kwargs=True)
    with torch.autocast("cpu", torch.bfloat16):
        with model.mean(), torch.no_grad():
            assert model(x).equal(want)
        out = model(x)
        assert out.dtype == torch.bfloat16 and not torch.allclose(out, want, atol=1e-3)
    out.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)
    model(x)
    rounded = torch.bfloat16 if estimator == "local" else torch.float32
    assert seen == [rounded, rounded, torch.float32], seen
    print(estimator)
"""


def run(script: str) -> list[str]:
    """Return the lines that a script prints in a process of its own."""
    places = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "PYTHONPATH": places}
    command = [sys.executable, "-W", "error", "-c", script]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    return result.stdout.splitlines()


def test_half_precision() -> None:
    assert len(run(SCRIPT)) == 6


def test_under_autocast_noise_sees_what_a_linear_layer_multiplies_with() -> None:
    """Not the float32 that autocast is about to round, which would be kept for the backward pass in its place."""
    assert run(LINEAR) == ["local", "drawn"]
