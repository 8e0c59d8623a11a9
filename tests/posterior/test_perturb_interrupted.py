"""Ctrl-C at any line of off(), remove() and perturb(): the network is one of two, and can always be had back."""

import copy
import signal
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import faults
import undrift
from perturb_support import adapt_a_little
from support import convnet, images, same, snapshot


def interrupted(call: Callable[[], Any], line: int) -> bool:
    """Make the call with a Ctrl-C at one of its lines, in undrift or contextlib; return whether it came to that."""
    left, frames = line, []

    def trace(frame: Any, event: str, _arg: Any) -> Any:
        nonlocal left
        file = frame.f_code.co_filename
        if "undrift" not in file and "contextlib" not in file:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                frames.append(frame.f_code.co_name)
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return bool(frames)


@pytest.fixture
def ctrl_c() -> Any:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def small() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 3)).eval()


def block(model: undrift.Perturbed) -> None:
    with model.off() as net:
        net.eval()


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize(
    "use", [block, lambda model: model.remove(), pytest.param(undrift.fingerprint, marks=pytest.mark.slow)]
)
def test_the_source_comes_back_bit_for_bit(use: Callable[[undrift.Perturbed], Any]) -> None:
    torch.manual_seed(0)
    source, x = small(), images(4)
    kept, expected = snapshot(source), source(x)
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in source.modules()]
    line = came = 0
    while came == line:
        line += 3  # of some hundred lines each; all of them would take three times as long
        model = undrift.perturb(copy.deepcopy(source), init_fraction=0.3)
        adapted = [p.layer.weight for p in model.norms]
        with torch.no_grad():
            for weight in adapted:
                assert isinstance(weight, Tensor)
                weight.mul_(2)
        came += 3 * interrupted(lambda model=model: use(model), line)  # type: ignore[misc]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if not model._removed:
            assert undrift.predict(model, x, 3).mutual_info.max() > 0
            assert all(p.layer.weight is weight for p, weight in zip(model.norms, adapted, strict=True))
        net = model.remove()
        assert same(snapshot(net), kept)
        assert torch.equal(net(x), expected)
        assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules()] == hooks
    assert came > 60


def test_half_a_perturbation_is_none() -> None:
    net = convnet()
    kept, hooked = snapshot(net), [len(m._forward_hooks) for m in net.modules()]
    with faults.interrupted_after(nn.Module, "register_forward_hook"), pytest.raises(KeyboardInterrupt):
        undrift.perturb(net)
    assert [len(m._forward_hooks) for m in net.modules()] == hooked
    assert same(snapshot(net), kept)
    adapt_a_little(undrift.perturb(net))


@pytest.mark.parametrize("mode", ["mean", "rest"])
def test_the_flags_of_a_mode_go_back_together(mode: str) -> None:
    model = undrift.perturb(convnet())
    # A signal is looked at in PyTorch's setter, a function of Python: the flags do not go through it.
    setter = mock.patch.object(nn.Module, "__setattr__", side_effect=KeyboardInterrupt)
    with getattr(model, mode)():
        setter.start()
    setter.stop()
    assert model.key.noisy
    assert model.key.training


def test_all_modules_get_their_flags_back() -> None:
    model = convnet().train()
    left = [0]

    class Stubborn(nn.Identity):
        """A module at which Ctrl-C comes, once, when its flag is put back."""

        def __setattr__(self, name: str, value: object) -> None:
            if name == "training" and value and left[0]:
                left[0] -= 1
                raise KeyboardInterrupt
            super().__setattr__(name, value)

    net = nn.Sequential(model, Stubborn(), nn.Identity().train())

    def now(*_: object) -> None:
        left[0] = 1

    net.register_forward_hook(now)
    with pytest.raises(KeyboardInterrupt):
        undrift.predict(net, images())
    assert not left[0]
    assert all(m.training for m in net.modules())
