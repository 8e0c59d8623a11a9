"""What `predict` asks of PyTorch besides the pass itself, a GPU being idle meanwhile: 20 µs an operator on a slow core.

The bounds are the counts when this was written: a call more has to be worth it.
"""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import undrift
from support import convnet, images
from undrift.answer import draws, fast_mode
from undrift.kernels.keys import keys_of


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


def test_few_operators_besides_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model = noisy()
    with Count(model.net) as count:  # type: ignore[arg-type]
        keys_of(model.key.seed, model.key.step, 8)
    keys = count.found["before"] + 1  # one launch on CUDA, and a view of each
    before, after = counted(model, samples=0)
    assert before <= 5
    assert after <= 15
    before, after = full = counted(model, samples=10, fold_limit=4096)
    assert before <= 6 + keys
    assert after <= 25
    monkeypatch.setattr(fast_mode, "launch_bound", lambda _images: True)
    assert counted(model, samples=10, fold_limit=4096, mode="fast") == full  # all draws are made, and no more is done
    monkeypatch.undo()
    before, after = counted(model, samples=10, fold_limit=4096, mode="fast")
    assert before <= 9 + keys
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


def test_a_call_asks_twice_at_most_whether_draws_fold(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[undrift.Perturbed] = []
    foldable = draws.foldable
    monkeypatch.setattr(draws, "foldable", lambda model: asked.append(model) or foldable(model))
    model = noisy()
    for settings, most in (({"samples": 0}, 0), ({"samples": 5}, 1), ({"samples": 5, "mode": "fast"}, 2)):
        asked.clear()
        undrift.predict(model, images(4), **settings)  # type: ignore[arg-type]
        assert len(asked) == most
    with pytest.raises(undrift.OptionError, match="fold_limit=-1"):
        undrift.predict(undrift.perturb(convnet(), estimator="drawn"), images(4), 5, mode="fast", fold_limit=-1)
