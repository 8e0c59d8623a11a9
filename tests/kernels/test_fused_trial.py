"""Where kernels cannot run, noise is drawn by other means, and that is said once: eager, compiled and exported."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import undrift
from fused_support import arguments
from undrift.kernels import choice, operators
from undrift.kernels.epsilon import keys_of
from undrift.kernels.layout import FLOATS
from undrift.kernels.triton import trial

NO_COMPILER = "Failed to find C compiler. Please specify via CC environment variable."


class Kernel:
    """Stands in for Triton's kernel of keys, on the CPU (device −1); counts its launches."""

    def __init__(self, does: Callable[[Tensor, Tensor, int], Tensor]) -> None:
        self.does, self.launches = does, 0

    def __call__(self, seed: Tensor, step: Tensor, count: int) -> Tensor:
        self.launches += 1
        return self.does(seed, step, count)


def _no_compiler(_seed: Tensor, _step: Tensor, _count: int) -> Tensor:
    raise RuntimeError(NO_COMPILER + "\nand a second line")


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Kernel]:
    """Let Triton be installed, and its first kernel do what it is given to do."""

    def begin(does: Callable[[Tensor, Tensor, int], Tensor], capturing: bool = False, installed: bool = True) -> Kernel:
        kernel = Kernel(does)
        found = {"is_available": lambda: capturing, "is_current_stream_capturing": lambda: capturing}
        parts: dict[Any, dict[str, Any]] = {
            trial: {"INSTALLED": True, "_refusals": {}, "_launched": kernel},
            torch.cuda: found,
            choice: {"has_triton": lambda: installed, "_said": set()},
        }
        for module, changed in parts.items():
            for name, value in changed.items():
                monkeypatch.setattr(module, name, value)
        return kernel

    return begin


def says(match: str) -> AbstractContextManager[object]:
    return pytest.warns(undrift.UndriftWarning, match=match)


def test_a_kernel_that_runs_is_tried_once(pretend: Callable[..., Kernel]) -> None:
    kernel = pretend(keys_of)
    assert [trial.refusal(-1) for _ in range(3)] == [""] * 3
    assert kernel.launches == 1
    assert choice.on_cuda(torch.zeros(2)) == "triton"
    assert kernel.launches == 1


def test_falling_back_is_said_once(pretend: Callable[..., Kernel]) -> None:
    pretend(keys_of, installed=False)
    with says("Triton is not installed"):
        assert choice.on_cuda(torch.zeros(2)) == "plain"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choice.on_cuda(torch.zeros(2)) == "plain"
    pretend(keys_of)
    assert choice.on_cuda(torch.zeros(2)) == "triton"
    with says("float64"):
        assert choice.on_cuda(torch.zeros(2, dtype=torch.float64)) == "plain"


def test_a_kernel_that_cannot_be_compiled_is_said_once_and_not_tried_again(pretend: Callable[..., Kernel]) -> None:
    kernel = pretend(_no_compiler)
    with says(r"slower.*did not run \(RuntimeError: Failed to find C compiler.*variable\.\).*Mend that, or"):
        assert choice.on_cuda(torch.zeros(2)) == "plain"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [choice.on_cuda(torch.zeros(2)) for _ in range(3)] == ["plain"] * 3
    assert kernel.launches == 1


def test_a_kernel_that_writes_other_keys_is_not_trusted(pretend: Callable[..., Kernel]) -> None:
    pretend(lambda seed, step, count: keys_of(seed, step, count) + 1)
    assert "wrote other numbers" in trial.refusal(-1)


def test_a_full_gpu_says_nothing_of_triton(pretend: Callable[..., Kernel]) -> None:
    def full(_seed: Tensor, _step: Tensor, _count: int) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    pretend(full)
    with pytest.raises(torch.OutOfMemoryError):
        trial.refusal(-1)
    assert not trial._refusals


def test_nothing_is_tried_while_a_graph_is_captured(pretend: Callable[..., Kernel]) -> None:
    kernel = pretend(_no_compiler, capturing=True)
    assert trial.refusal(-1) == ""
    assert (kernel.launches, trial._refusals) == (0, {})


def test_a_driver_without_memory_says_nothing_of_triton(pretend: Callable[..., Kernel]) -> None:
    def full(*_: Any) -> Tensor:
        raise RuntimeError("Triton Error [CUDA]: out of memory")

    pretend(full)
    with pytest.raises(RuntimeError, match="out of memory"):
        trial.refusal(-1)
    assert not trial._refusals


def test_a_warning_is_no_refusal_where_warnings_are_errors(pretend: Callable[..., Kernel]) -> None:
    def warns(seed: Tensor, step: Tensor, count: int) -> Tensor:
        warnings.warn("this will change", UserWarning, stacklevel=2)
        return keys_of(seed, step, count)

    pretend(warns)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert trial.refusal(-1) == ""


def test_a_trial_is_not_seen_by_fake_tensors(pretend: Callable[..., Kernel]) -> None:
    kernel = pretend(keys_of)
    with FakeTensorMode():
        assert trial.refusal(-1) == ""
    assert kernel.launches == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # it says that it is a prototype
def test_the_real_kernel_runs_where_waiting_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_refusals", {})
    try:
        torch.cuda.set_sync_debug_mode("error")
        assert trial.refusal(torch.cuda.current_device()) == ""
        assert torch.cuda.get_sync_debug_mode() == 2
    finally:
        torch.cuda.set_sync_debug_mode("default")


class OnCuda(Tensor):
    """A tensor on a CPU that says it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("dtype", "installed", "match"),
    [(torch.float64, True, r"this is torch\.float64"), (torch.float32, False, "Triton is not installed")],
)
def test_operators_of_a_compiled_graph_say_why_they_are_slow(
    pretend: Callable[..., Kernel], dtype: torch.dtype, installed: bool, match: str
) -> None:
    """A graph for CUDA holds the operator; what it does there, it decides and says when it runs."""
    pretend(keys_of, installed=installed)
    assert choice._compiled(torch.zeros(2, dtype=dtype).as_subclass(OnCuda), FLOATS) == "operator"
    y = arguments((2, 4, 3, 3), 2, False, dtype)[0].as_subclass(OnCuda)
    with says(match + r".*UNDRIFT_NOISE=plain"):
        assert not operators._launches(y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not operators._launches(y)
