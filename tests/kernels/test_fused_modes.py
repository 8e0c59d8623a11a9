"""Noise on a CPU under modes and defaults that a user may have set: inference mode, autocast, torch's defaults."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from undrift.kernels import cpu, force, reference
from undrift.kernels.dispatch import add_noise

KEY = torch.tensor(2**40 + 7)


def tensors(memory: torch.memory_format, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    y = torch.randn(4, 32, 16, 16, generator=draw).to(dtype).contiguous(memory_format=memory)
    return y, torch.rand(4, 1, 16, 16, generator=draw), torch.randn(32, generator=draw)


def in_a_new_thread(call: Callable[[], None]) -> None:
    """Buffers are a thread's own: a new one has none yet."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("inference_first", [True, False])
def test_inference_mode_leaves_nothing_behind(memory: torch.memory_format, inference_first: bool) -> None:
    y, plane, log_var = tensors(memory)

    def draws() -> None:
        with torch.inference_mode(inference_first):
            first = add_noise(y, plane, log_var, KEY, 0, 1, False)
        with torch.inference_mode(not inference_first):
            big = add_noise(y.repeat(9, 1, 1, 1), plane.repeat(9, 1, 1, 1), log_var, KEY, 0, 1, False)  # buffers grow
        again = add_noise(y, plane, log_var, KEY, 0, 1, False)
        assert torch.equal(first, again)
        assert torch.equal(big[:4], again)

    with force("cpu"):
        in_a_new_thread(draws)


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_torchs_defaults_change_nothing(memory: torch.memory_format) -> None:
    y, plane, log_var = tensors(memory)
    want = cpu.noisy(y, plane, log_var, KEY, 0, 1, False)[0]

    def draws() -> None:
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device("meta"):
                assert torch.equal(cpu.noisy(y, plane, log_var, KEY, 0, 1, False)[0], want)
        finally:
            torch.set_default_dtype(torch.float32)

    in_a_new_thread(draws)


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_a_backward_pass_inside_autocast_is_as_exact_as_outside(memory: torch.memory_format) -> None:
    y, plane, log_var = tensors(memory, torch.bfloat16)
    grad = torch.randn_like(y)
    kept = cpu.noise(y, plane, KEY, 0, 1, False)
    with torch.autocast("cpu", torch.bfloat16):
        inside = cpu.noise_gradients(grad, kept, plane, log_var, 1, False)
    for found, want in zip(inside, reference.noise_gradients(grad, plane, log_var, KEY, 0, 1, False), strict=True):
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
