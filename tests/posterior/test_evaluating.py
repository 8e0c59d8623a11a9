"""A network is asked in eval mode, and every module has its own flag back afterwards."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import undrift
from support import convnet, images


def flags(net: nn.Module) -> list[bool]:
    return [m.training for m in net.modules()]


def asked(net: nn.Module, meanwhile: Callable[[], object] = bool, of: nn.Module | None = None) -> list[bool]:
    """Return the flags while the network is asked; something happens meanwhile."""
    found: list[bool] = []

    def look(_net: nn.Module, _args: object) -> None:
        found.extend(flags(of or net))
        meanwhile()

    with net.register_forward_pre_hook(look):
        undrift.predict(of or net, images(2), samples=0)
    return found


class Stubborn(nn.Module):
    """A module that keeps a part of itself in train mode, as dropout for uncertainty is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.calls = nn.Sequential(nn.Dropout(0.5)), 0

    def train(self, mode: bool = True) -> "Stubborn":
        self.calls += 1
        super().train(mode)
        self.inside.train()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x)


def classifier(*parts: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 2), *parts)


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_a_network_half_in_train_mode_gets_its_flags_back(error: type[BaseException] | None) -> None:
    net = nn.Sequential(convnet().train(), nn.Identity())
    net[0][1].eval()  # type: ignore[index]
    net.append(net[1])  # a module twice
    model = undrift.perturb(net)
    model.key.eval()
    before = flags(model)
    assert len(set(before)) == 2

    def meanwhile() -> None:
        net[1].train()  # what happens meanwhile is undone too
        if error is not None:
            raise error

    with contextlib.suppress(RuntimeError, KeyboardInterrupt):
        assert not any(asked(net, meanwhile, of=model))
    assert flags(model) == before


def test_a_network_in_eval_mode_is_left_alone() -> None:
    net = nn.Sequential(convnet(), nn.Sequential()).eval()
    told: list[bool] = []
    net[1].train = lambda mode=True: told.append(mode)  # type: ignore[method-assign, assignment]
    asked(net, lambda: net[0].train())
    assert not any(flags(net))
    assert told == []


def test_modules_with_a_train_of_their_own_are_asked() -> None:
    net = classifier(Stubborn()).train()
    assert asked(net) == [False, False, False, False, True, True]
    assert net[2].calls >= 2
    assert all(flags(net))
    # The same, put on one module, which is then not entered.
    fixed = classifier(nn.Sequential(nn.Dropout(0.5)))
    fixed[2].train = lambda mode=True: fixed[2]  # type: ignore[method-assign, misc]
    assert asked(fixed) == [False, False, False, True, True]
    assert all(flags(fixed))


def test_modules_that_hold_their_flag_in_another_way_are_asked() -> None:
    class Elsewhere(nn.Identity):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "training":
                seen.append(value)
            super().__setattr__(name, value)

    seen: list[bool] = []
    net = classifier(Elsewhere())
    seen.clear()
    asked(net)
    assert seen == [False, True]


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_scripted_part() -> None:
    scripted = classifier(torch.jit.trace(nn.Sequential(nn.Linear(2, 2)), torch.zeros(1, 2)))
    assert not any(asked(scripted))
    assert all(flags(scripted))
