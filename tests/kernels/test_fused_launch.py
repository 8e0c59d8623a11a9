"""What one call of a kernel compiled is launched by the next, if that call's tensors are like the first one's."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from undrift.kernels.triton.launch import Launch

runtime = pytest.importorskip("triton.runtime")

Launched = list[tuple[Any, ...]]


class Kernel:
    """A kernel whose calls and launches are recorded: `compiled` by Triton's search, `again` without it."""

    arg_names = ("x", "out", "count", "BLOCK")

    def __init__(self) -> None:
        self.compiled: Launched = []
        self.again: Launched = []

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., Any]:
        def first(*given: Any, **constants: Any) -> Any:
            self.compiled.append((grid, given, constants))
            return SimpleNamespace(run=lambda *words: self.again.append(words), function=7, packed_metadata=(4, 1))

        return first


@pytest.fixture(params=[True])
def kernel(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Kernel:
    """Return a kernel of a Triton whose version is known, or is not."""
    streams = SimpleNamespace(get_current_stream=lambda device: 100 + device)
    monkeypatch.setattr(runtime.driver, "_active", streams)
    monkeypatch.setattr("undrift.kernels.triton.launch._runs_directly", lambda: request.param)
    return Kernel()


def launch_of(kernel: Kernel) -> Launch:
    return Launch(kernel, (5, 3), (11,), {"BLOCK": 64}, warps=2)


def aligned(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    tensor = torch.zeros(count + 16, dtype=dtype)
    return tensor[-(tensor.data_ptr() // tensor.element_size()) % (16 // tensor.element_size()) :]


def test_the_second_launch_goes_straight_to_what_the_first_compiled(kernel: Kernel) -> None:
    launch, x, out = launch_of(kernel), aligned(4), aligned(4)
    launch(x, out)
    assert kernel.compiled == [((5, 3), (x, out, 11), {"num_warps": 2, "BLOCK": 64})]
    launch(x, out)
    assert len(kernel.compiled) == 1
    stream = 100 + x.get_device()
    assert kernel.again == [(5, 3, 1, stream, 7, (4, 1), None, None, None, x.data_ptr(), out.data_ptr(), 11, 64)]


@pytest.mark.parametrize("first", [True, False], ids=["from the first", "later"])
def test_tensors_of_another_alignment_are_left_to_triton(kernel: Kernel, first: bool) -> None:
    launch, x, out = launch_of(kernel), aligned(4), aligned(4)
    if not first:
        launch(x, out)
    launch(x[1:], out)
    launch(x[1:], out)
    assert len(kernel.compiled) == 2 + (not first)
    assert not kernel.again


def test_each_dtype_has_a_kernel_of_its_own(kernel: Kernel) -> None:
    launch, out = launch_of(kernel), aligned(4)
    for dtype in (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16):
        launch(aligned(4, dtype), out)
    assert [given[0].dtype for _, given, _ in kernel.compiled] == [torch.float32, torch.bfloat16]
    assert len(kernel.again) == 2


@pytest.mark.parametrize("kernel", [False], indirect=True)
def test_triton_of_an_unknown_version_is_asked_each_time(kernel: Kernel) -> None:
    launch, x, out = launch_of(kernel), aligned(4), aligned(4)
    launch(x, out)
    launch(x, out)
    assert len(kernel.compiled) == 2
