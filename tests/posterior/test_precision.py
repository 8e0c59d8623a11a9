"""Whole networks in half precision and under autocast.

In a process of its own: some CPUs announce matrix instructions for bfloat16 that they cannot run, and what oneDNN may
use must be said before PyTorch is imported.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.slow
def test_half_precision() -> None:
    places = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "PYTHONPATH": places}
    command = [sys.executable, "-W", "error", "-c", SCRIPT]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    assert len(result.stdout.splitlines()) == 6
