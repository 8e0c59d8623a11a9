"""What `predict` asks of PyTorch besides the pass itself, a GPU being idle meanwhile: 20 µs an operator on a slow core.

The bounds are the counts when this was written: a call more has to be worth it.
"""

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import undrift
from faults import bound_by_launches
from support import convnet, images

KEYS = 20  # operators that make a step's keys: one launch on CUDA


class Timed(nn.Module):
    """A network that says whether its pass has begun and ended."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.place = convnet(), "before"

    def forward(self, x: Tensor) -> Tensor:
        self.place = "inside"
        out: Tensor = self.net(x)
        self.place = "after"
        return out


class Count(TorchDispatchMode):
    """A mode that counts operators by the place of a network's pass."""

    def __init__(self, net: Timed) -> None:
        super().__init__()
        self.net, self.found = net, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[self.net.place] += func.namespace == "aten"
        return func(*args, **(kwargs or {}))


def counted(model: undrift.Perturbed, **settings: Any) -> tuple[int, int]:
    """Return the operators before the one pass of a call, and after it."""
    x, model.net.place = images(8), "before"
    with Count(model.net) as count:  # type: ignore[arg-type]
        undrift.predict(model, x, **settings)
    return count.found["before"], count.found["after"]


def noisy() -> undrift.Perturbed:
    model = undrift.perturb(Timed(), norm_statistics="source", init_fraction=0.3)
    model(images(2))  # the first pass gets a copy of its images, to see whether the network writes into them
    model.net.place = "before"  # type: ignore[assignment]
    return model


def test_few_operators_besides_the_pass() -> None:
    model = noisy()
    before, after = counted(model, samples=0)
    assert before <= 5
    assert after <= 15
    before, after = full = counted(model, samples=10, fold_limit=4096)
    assert before <= 6 + KEYS
    assert after <= 25
    with bound_by_launches():  # all draws are made, and no more is done
        assert counted(model, samples=10, fold_limit=4096, mode="fast") == full
    before, after = counted(model, samples=10, fold_limit=4096, mode="fast")
    assert before <= 9 + KEYS
    assert after <= 124


def test_the_mean_network_makes_no_keys_and_the_next_draw_is_what_it_was() -> None:
    model, x = noisy(), images(3)
    with torch.no_grad():
        model.reseed(4)
        first, second = model(x), model(x)
        model.reseed(4)
        with model.mean():
            model(x)
            assert model.key.current is None
        assert torch.equal(model(x), second)  # the mean network's pass is a step, too
        model.reseed(4)
        undrift.predict(model, x, samples=0)
        assert torch.equal(model(x), first)
