"""Noise on a CPU: pieces of any size, and rows on whatever side of a border, draw the same."""

import threading

import pytest
import torch
from torch import Tensor

from fused_support import KEY, arguments
from undrift.kernels import cpu, reference

SHAPE = (3, 6, 20, 30)


@pytest.mark.parametrize(
    ("shape", "groups", "last"),
    [
        (SHAPE, 1, False),
        ((3, 5, 20, 30), 1, False),
        ((2, 6, 300), 3, False),
        ((40, 33), 1, True),
        ((4, 9, 64), 1, True),
        # Of several pieces: whole planes each, parts of one plane, parts of a group's, rows, and rows of tokens.
        ((3, 6, 120, 130), 1, False),
        ((1, 2, 400, 401), 1, False),
        ((2, 6, 70_001), 3, False),
        ((4001, 99), 1, True),
        ((4, 999, 65), 1, True),
    ],
)
def test_however_many_pieces_there_are_they_draw_the_same(shape: tuple[int, ...], groups: int, last: bool) -> None:
    y, plane, _, _ = arguments(shape, groups, last)
    orders = [y] if y.ndim != 4 else [y, y.to(memory_format=torch.channels_last)]
    for ordered in orders:
        found = cpu.noise(ordered, plane, KEY, 3, groups, last)
        root = reference.spread(plane.sqrt(), y.shape, groups, last)
        torch.testing.assert_close(found, root * reference.drawn(KEY, y.shape, 3, last), rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize("low", [0, 2**17 - 1, 2**32 - 1, 2**32 - 2**17 + 5])
@pytest.mark.parametrize("shape", [(200_000, 3, 1), (2, 4, 100_000), (1, 200_000, 2)])
def test_rows_and_columns_wrap_around_and_cross_pieces(low: int, shape: tuple[int, ...]) -> None:
    """At 2³² rows and columns begin anew."""
    key, out = torch.tensor(low - 5 * 2**32), torch.empty(shape)
    cpu.fill(out, key, 7 * shape[2])
    torch.testing.assert_close(out, reference.drawn(key, out.shape, 7, False), rtol=0, atol=3e-6)


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_what_is_written_to_belongs_to_autograd(order: torch.memory_format) -> None:
    """Drawn in inference mode, it is none of that mode's tensors: those could be kept by no graph."""
    y, plane, log_var, grad = arguments(SHAPE, 1, False)
    out, kept = cpu.noisy(y.to(memory_format=order), plane, log_var, KEY, 0, 1, False)
    assert not out.is_inference()
    assert not kept.is_inference()
    (kept.requires_grad_() * grad).sum().backward()
    assert torch.equal(kept.grad, grad)


@pytest.mark.parametrize("plane", [0.0, 1e-42, 1e-30, 1e30])
def test_energies_of_any_size_have_finite_gradients(plane: float) -> None:
    y, energy, log_var, grad = arguments(SHAPE, 1, False)
    energy = torch.full_like(energy, plane)
    kept = cpu.noise(y, energy, KEY, 0, 1, False)
    assert kept.isfinite().all()
    got = cpu.noise_gradients(grad, kept, energy, log_var, 1, False)
    assert all(g.isfinite().all() for g in got)
    if plane in {1e-30, 1e30}:
        want = reference.noise_gradients(grad, energy, log_var, KEY, 0, 1, False)
        assert all(
            torch.allclose(g, w, rtol=1e-3, atol=0.1 * w.abs().mean().item()) for g, w in zip(got, want, strict=True)
        )
    else:
        assert plane or not got[0].any()


def test_threads_draw_in_buffers_of_their_own() -> None:
    y, plane, _, _ = arguments(SHAPE, 1, False)
    keys = [torch.tensor(k) for k in range(4)]
    want = [cpu.noise(y, plane, key, 0, 1, False) for key in keys]
    got: list[Tensor] = [y] * 4

    def run(number: int) -> None:
        for _ in range(10):
            got[number] = cpu.noise(y, plane, keys[number], 0, 1, False)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
