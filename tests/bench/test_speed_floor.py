"""What noise costs at the least: bytes and operations counted by hand."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from undrift.kernels import cpu
from undrift_bench.bench.speed import floor as speed_floor
from undrift_bench.bench.speed.floor import OPERATIONS, extra_bytes, floor, issuing, layers
from undrift_bench.bench.speed.steps import Case


class Two(Case):
    def build(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.Conv2d(4, 5, 1))


X = torch.zeros(2, 3, 6, 6)
POSITIONS = 2 * 6 * 6


def test_the_bytes_of_the_noise_by_hand() -> None:
    """x and y of each layer: x, 2 y and grad of y; but for the first layer also x, its gradient, and that again."""
    assert extra_bytes(layers(Two("two", 2, 6), X), low=False) == 4 * POSITIONS * ((3 + 3 * 4) + (4 * 4 + 3 * 5))
    assert extra_bytes(layers(Two("two", 2, 6), X), low=True, compiled=True) == 2 * POSITIONS * 3 * (4 + 5)


def test_operations_are_those_of_every_value_that_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed_floor, "copying", lambda _device: 1e6)
    found = floor(layers(Two("two", 2, 6), X), X.device, low=False)
    assert found["operations"] == POSITIONS * (4 + 5) * sum(OPERATIONS["cpu"])
    assert found["extra_ms"] == pytest.approx(1e-3 * found["extra_bytes"])
    assert "operations_ms" not in found  # nobody knows how many a CPU starts


class Counting(TorchDispatchMode):
    """Counts the operators that write over a whole piece: in place, or into a buffer."""

    count = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, _, overload = str(func).removeprefix("aten.").partition(".")
        # `__xor__` and its like make the words of rows and columns: one a position, one a channel.
        self.count += (name.endswith("_") and not name.startswith("__")) or overload.endswith("out")
        return func(*args, **(kwargs or {}))


def test_a_cpu_makes_as_many_operations_as_are_counted() -> None:
    y, plane, log_var = torch.rand(2, 8, 4, 4), torch.rand(2, 1, 4, 4), torch.zeros(8)
    with Counting() as drawing:
        cpu.fill(torch.empty(2, 8, 16), torch.tensor(1), 0)
    with Counting() as adding:
        cpu.add_noise(y, plane, log_var, torch.tensor(1), 0, 1, False)
    # One word makes two values, with √plane inside; σ is multiplied by one operator more, that makes the output.
    assert adding.count == drawing.count
    assert drawing.count / 2 + 1 == OPERATIONS["cpu"][0]


def test_a_gpu_starts_as_many_instructions_as_its_clock_and_multiprocessors_allow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    about = SimpleNamespace(multi_processor_count=132, clock_rate=1_980_000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: about)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    gpu = torch.device("cuda")
    assert issuing(gpu) == 128 * 132 * 1.98e9
    del about.clock_rate
    assert issuing(gpu) is None
    assert issuing(torch.device("cpu")) is None
