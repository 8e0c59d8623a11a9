"""`evaluating`: eval mode for a while, and every module's own flag afterwards."""

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

import undrift
from support import convnet
from undrift.posterior.layers import evaluating


def flags(net: nn.Module) -> list[bool]:
    return [m.training for m in net.modules()]


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


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_a_network_half_in_train_mode_gets_its_flags_back(error: type[BaseException] | None) -> None:
    net = convnet().train()
    net[1].eval()
    net.append(net[0])  # a module twice
    model = undrift.perturb(net)
    model.key.eval()
    before = flags(model)
    assert len(set(before)) == 2
    with contextlib.suppress(RuntimeError, KeyboardInterrupt), evaluating(model):
        assert not any(flags(model))
        net[1].train()  # what happens meanwhile is undone too
        if error is not None:
            raise error
    assert flags(model) == before


def test_a_network_in_eval_mode_is_left_alone() -> None:
    net = nn.Sequential(convnet(), nn.Sequential()).eval()
    asked: list[bool] = []
    net[1].train = lambda mode=True: asked.append(mode)  # type: ignore[method-assign, assignment]
    with evaluating(net):
        net[0].train()
    assert not any(flags(net))
    assert asked == []


def test_modules_with_a_train_of_their_own_are_asked() -> None:
    net = nn.Sequential(nn.Linear(2, 2), Stubborn()).train()
    with evaluating(net):
        assert flags(net) == [False, False, False, True, True]
        assert net[1].calls == 2  # once before
    assert all(flags(net))
    # The same, put on one module, which is then not entered.
    fixed = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(0.5)))
    fixed[1].train = lambda mode=True: fixed[1]  # type: ignore[method-assign, misc]
    with evaluating(fixed):
        assert flags(fixed) == [False, False, True, True]
    assert all(flags(fixed))


def test_modules_that_hold_their_flag_in_another_way_are_asked() -> None:
    class Elsewhere(nn.Module):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "training":
                seen.append(value)
            super().__setattr__(name, value)

    seen: list[bool] = []
    net = nn.Sequential(Elsewhere())
    seen.clear()
    with evaluating(net):
        assert seen == [False]
    assert seen == [False, True]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_part() -> None:
    scripted = nn.Sequential(torch.jit.trace(nn.Sequential(nn.Linear(2, 2)), torch.zeros(1, 2)))
    with evaluating(scripted):
        assert not any(flags(scripted))
    assert all(flags(scripted))
