"""Compiled steps with a GPU's operators, on a CPU: a script, run by test_step_loss.py with TRITON_INTERPRET=1.

PyTorch's compiler cannot look into interpreted kernels. So the operators are opaque here, and all that Dynamo and
autograd make of them is as on a GPU: what is shared, handed over, kept for the backward pass and added up.
"""

import copy
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, library, nn
from torch._subclasses.fake_tensor import FakeTensor


def opaque(name: str, *, mutates_args: tuple[()]) -> Callable[[Any], Any]:
    def made(function: Any) -> Any:
        operator = library.custom_op(name, function, mutates_args=mutates_args)
        operator.register_fake(function)
        return operator

    return made


class Interpreted:
    """A kernel that runs where its tensors have values."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **constants: Any) -> None:
            if not any(isinstance(a, FakeTensor) or (isinstance(a, Tensor) and a.is_meta) for a in args):
                constants.pop("num_warps", None)
                with torch.no_grad():
                    self.kernel[grid](*args, **constants)
                ran.add(self.kernel.__name__ if hasattr(self.kernel, "__name__") else self.kernel.fn.__name__)

        return launch


ran: set[str] = set()
warnings.simplefilter("ignore")
library.triton_op, library.wrap_triton = opaque, Interpreted  # type: ignore[assignment]

import undrift  # noqa: E402
from every_layer import Every  # noqa: E402
from undrift.kernels import choice  # noqa: E402
from undrift.kernels.triton import launch, tiles  # noqa: E402

tiles.processors = lambda _index: 1  # type: ignore[assignment]
launch.SUMMING = tiles.Cut(256, 1, {64: 8, 32: 8, 8: 8})
choice._compiled = lambda large, dtypes: "traced" if large.dtype in dtypes else "operator"

Loss = Callable[[undrift.Perturbed, Tensor], Tensor]


def gradients(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}


def compare(what: str, loss: Loss, prepare: Callable[[undrift.Perturbed], object] = bool, **options: Any) -> list[str]:
    """Return the parameters whose gradient is another than in uncompiled code."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    settings = {"init_fraction": 0.04, "linear_sharing": "kernel", "norm_statistics": "batch"} | options
    model = undrift.perturb(Every(64, 1280), **settings).eval()
    prepare(model)
    twin = copy.deepcopy(model)
    for each in (model, twin):
        each.reseed(1)
    x = torch.rand(2, 3, 4, 4)
    want = gradients(loss(twin, x), twin)
    got = gradients(torch.compile(lambda x: loss(model, x), fullgraph=True, backend="aot_eager")(x), model)
    missing = [name for name in want if name not in got] + [name for name in got if name not in want]
    off = [n for n in want if n in got and not (got[n] - want[n]).norm() <= 5e-3 * want[n].norm() + 1e-10]
    wrong = [f"{what}: {name}" for name in missing + off]
    if model.key.handles is not None or model.key.next_handles is not None:
        wrong.append(f"{what}: handles were left behind")
    return wrong


def freeze(model: undrift.Perturbed) -> None:
    model.noises()[0].log_var.requires_grad_(False)


# Of so many images noise and KL have gradients of about one size.
wrong = compare("one loss", lambda m, x: undrift.step_loss(m, x, 10**8))
if not {"add_layers_kernel", "noise_parts_kernel", "add_pulls_kernel"} <= ran:
    wrong.append(f"nothing was shared: {sorted(ran)}")
wrong += compare("a pass beside it", lambda m, x: undrift.step_loss(m, x, 10**8) + undrift.entropy(m(x)))
wrong += compare("apart", lambda m, x: undrift.entropy(m(x)) + undrift.kl_term(m, 10**8))
wrong += compare("frozen", lambda m, x: undrift.step_loss(m, x, 10**8), freeze)
wrong += compare("drawn", lambda m, x: undrift.step_loss(m, x, 10**8), estimator="drawn")
sys.exit("\n".join(wrong) or 0)
