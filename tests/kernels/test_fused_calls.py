"""A kernel that Triton compiled is launched directly, once it was seen to write what Triton's own launch wrote."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from undrift.kernels.triton import calls


class Compiled:
    """What Triton compiled: `run` takes what its launcher takes, and writes nothing."""

    function, packed_metadata = 7, (4, 1, 0)

    def __init__(self, arguments: int) -> None:
        self.arguments, self.ran = arguments, 0

    def run(self, across: int, down: int, deep: int, stream: int, function: int, packed: object, *rest: object) -> None:
        assert (across, down, deep, stream, function, packed, rest[:3]) == (3, 2, 1, 5, 7, (4, 1, 0), (None,) * 3)
        if len(rest[3:]) != self.arguments:
            raise TypeError("function takes another number of arguments")
        self.ran += 1


def pretend_cuda(monkeypatch: pytest.MonkeyPatch, version: tuple[int, int]) -> None:
    """Let a CPU look like GPU 0, its stream be 5, and Triton be of that version."""
    for name, value in {"_cuda_getDevice": lambda: 0, "_cuda_getCurrentRawStream": lambda _index: 5}.items():
        monkeypatch.setattr(torch._C, name, value, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda _index: nullcontext())
    monkeypatch.setattr(calls, "triton_version", lambda: version)
    monkeypatch.setattr(calls, "direct_launches", lambda: True)


@pytest.mark.parametrize(("version", "passed", "quick"), [((3, 2), 3, True), ((3, 6), 5, True), ((3, 6), 3, False)])
def test_a_compiled_kernel_is_launched_directly_once_it_was_seen_to_work(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int], passed: int, quick: bool
) -> None:
    """Two tensors, one number, two constants: Triton 3.2's launcher takes three arguments, later ones five."""
    pretend_cuda(monkeypatch, version)
    monkeypatch.setattr(calls, "_alike", lambda _a, _b: True)
    compiled, launched = Compiled(passed), []
    kernel = {(3, 2): lambda *args, **constants: launched.append((args, constants)) or compiled}
    call = calls.Call(kernel, (3, 2), (9,), {"A": 1, "B": 2}, 0, (1,))
    x = torch.zeros(64)
    for _ in range(3):
        call(x, x)
    assert len(launched) == (1 if quick else 3)
    assert launched[0] == ((x, x, 9), {"A": 1, "B": 2, "num_warps": 4})
    assert compiled.ran == (3 if quick else 0)  # once to be seen
    call(x[1:], x)  # not a multiple of 16 bytes: Triton compiles another kernel
    assert len(launched) == (2 if quick else 4)


def test_a_kernel_that_writes_something_else_is_not_launched_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cuda(monkeypatch, (3, 6))
    compiled, launched = Compiled(2), []

    def kernel(_x: Tensor, out: Tensor, num_warps: int) -> Compiled:
        assert num_warps == 8
        out.fill_(1.2345)
        launched.append(out)
        return compiled  # its run writes nothing

    call = calls.Call({(3, 2): kernel}, (3, 2), (), {}, 0, (1,), warps=8)
    for _ in range(3):
        call(torch.zeros(64), torch.zeros(64))
    assert (len(launched), compiled.ran) == (3, 1)


@pytest.mark.parametrize("device", [0, 1])
def test_two_kernels_in_turn(monkeypatch: pytest.MonkeyPatch, device: int) -> None:
    """Both directly once both may be, in their order; misaligned, or on another GPU than the current one, by Triton."""
    pretend_cuda(monkeypatch, (3, 6))
    monkeypatch.setattr(calls, "_alike", lambda _a, _b: True)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: device, raising=False)
    compiled, launched = [Compiled(2), Compiled(3)], []
    kernels = [{(3, 2): lambda *args, num_warps, n=n: launched.append((n, args)) or compiled[n]} for n in range(2)]
    first, second = (calls.Call(kernel, (3, 2), (), {}, 0, (1,)) for kernel in kernels)
    x = torch.zeros(64)
    calls.in_turn(first, (x, x), second, (x, x, x))
    assert [n for n, _ in launched] == [0, 1]
    calls.in_turn(first, (x, x), second, (x, x, x))
    assert len(launched) == (2 if device == 0 else 4)
    assert [c.ran for c in compiled] == ([2, 2] if device == 0 else [0, 0])  # once to be seen
    calls.in_turn(first, (x, x), second, (x, x[1:], x))
    assert [n for n, _ in launched][-1] == 1
    assert [c.ran for c in compiled] == ([3, 2] if device == 0 else [0, 0])
