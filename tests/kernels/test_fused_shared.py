"""Log-variances that all layers share in a compiled graph: the kernels, and what autograd is told of them."""

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from fused_support import KEY, arguments, in_orders, kernels_device, numpys, triton
from undrift.kernels import reference
from undrift.kernels.triton import launch, tiles

SHAPES = {"conv": ((2, 64, 3, 4), False), "many channels": ((2, 192, 2, 2), False), "tokens": ((2, 5, 160), True)}
shapes = pytest.mark.parametrize(("shape", "last"), SHAPES.values(), ids=SHAPES)


@triton
@numpys
@pytest.mark.slow
@shapes
@pytest.mark.parametrize("by_rows", [False, True])
def test_parts_add_up_to_the_gradient(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], last: bool, by_rows: bool
) -> None:
    from undrift.kernels.triton import traced

    device = kernels_device(monkeypatch, "one program")
    monkeypatch.setattr(traced, "SUMMING", tiles.Cut(256, 1, {64: 4, 32: 4}))
    _, plane, log_var, grad = (t.to(device) for t in arguments(shape, 1, last))
    settings = (KEY.to(device), 2, 1, last)
    for v in in_orders(grad):
        want, of_log_var = reference.noise_gradients(v, plane, log_var, *settings)
        for count in (1, 3, 12):  # more programs than there are positions leave nothing in theirs
            pull, parts = traced.noise_parts(v, plane, log_var, *settings, count, by_rows)
            torch.testing.assert_close(pull, want, rtol=1e-3, atol=1e-4)
            assert parts.shape == (count, len(log_var))
            torch.testing.assert_close(parts.sum(0), of_log_var, rtol=1e-3, atol=1e-4)


@triton
@numpys
@pytest.mark.parametrize("channels", [160, 31])
def test_a_plane_in_parts_is_their_sum(monkeypatch: pytest.MonkeyPatch, channels: int) -> None:
    """Also before an odd number of channels, whose kernels take one number a position."""
    from undrift.kernels.triton import traced

    device = kernels_device(monkeypatch)
    y, plane, log_var, grad = (t.to(device) for t in arguments((2, 7, channels), 1, True))
    settings = (KEY.to(device), 2, 1, True)
    parts = plane * torch.tensor([0.2, 0.3, 0.5], device=device)
    want = traced.add_noise(y, plane, log_var, *settings)
    torch.testing.assert_close(traced.add_noise(y, parts, log_var, *settings), want, rtol=1e-5, atol=1e-5)
    whole, of_log_var = reference.noise_gradients(grad, plane, log_var, *settings)
    for pull, other in (
        traced.noise_gradients(grad, parts, log_var, *settings),
        traced.noise_parts(grad, parts, log_var, *settings, 3, False),
        traced.noise_parts(grad, parts, log_var, *settings, 3, True),
    ):
        torch.testing.assert_close(pull, whole.expand_as(parts), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(other.reshape(-1, channels).sum(0), of_log_var, rtol=1e-3, atol=1e-4)


@triton
@numpys
def test_parts_of_a_layer_with_groups_are_those_of_its_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that two layers share has the first one's number of parts; the second may have groups."""
    from undrift.kernels.triton import traced

    device = kernels_device(monkeypatch)
    _, plane, log_var, grad = (t.to(device) for t in arguments((2, 8, 3, 3), 2, False))
    given = (grad, plane, log_var, KEY.to(device), 2, 2, False)
    want, of_log_var = reference.noise_gradients(*given)
    pull, parts = traced.noise_parts(*given, 3, False)
    torch.testing.assert_close(pull, want, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(parts.sum(0), of_log_var, rtol=1e-3, atol=1e-4)


@triton
@pytest.mark.parametrize("channels", [1536, 1280])
def test_the_energy_of_wide_rows_comes_in_parts(channels: int) -> None:
    from undrift.kernels.triton import traced

    x = torch.randn(2, 3, channels, requires_grad=True)
    assert traced.in_parts(x)
    parts = traced.square_parts(x)
    torch.testing.assert_close(parts.sum(-1, keepdim=True), reference.square_sum(x, 1, True))
    pull = torch.randn(2, 3, 1)
    parts.backward(pull.expand_as(parts))
    torch.testing.assert_close(x.grad, 2 * x.detach() * pull)


@triton
@pytest.mark.parametrize("channels", [768, 1030, 2048])
def test_other_rows_have_one_energy(channels: int) -> None:
    from undrift.kernels.triton import traced

    assert not traced.in_parts(torch.empty(2, channels))


def rows(*shapes: tuple[int, int]) -> list[Tensor]:
    return [torch.randn(shape) for shape in shapes]


@triton
@numpys
def test_all_layers_are_added_up_each_at_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """More layers alike than one kernel takes, others between them, and the KL's gradient."""
    from undrift.kernels.triton import shared

    device = kernels_device(monkeypatch)
    parts = [p.to(device) for p in rows(*[(5, 12)] * 9, (1, 7), *[(5, 12)] * 9, (300, 4), (1, 7))]
    more = torch.randn(sum(p.shape[1] for p in parts), device=device)
    want = torch.cat([p.sum(0) for p in parts]) + more
    torch.testing.assert_close(shared.add_layers(parts, more), want)
    one = torch.tensor(2.0, device=device).expand_as(more)  # in memory it is one number
    torch.testing.assert_close(shared.add_layers(parts, one), want - more + 2)


@triton
@numpys
def test_autograd_gives_each_log_variance_its_noise_and_its_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The handle gets the noise's gradient, and log_var itself none: it would be counted twice."""
    from undrift.kernels.triton import shared, traced

    device = kernels_device(monkeypatch, "one program")
    y, plane, log_var, grad = (t.to(device) for t in arguments((2, 7, 160), 1, True))
    other = torch.randn(6, device=device)
    own = [v.clone().requires_grad_() for v in (log_var, other)]
    row, *handles = shared.spread(own, [1, 2], [True, False])
    assert torch.equal(row, torch.cat(own))
    assert [h.shape for h in handles] == [(handles[0].shape[0], 160), (1, 6)]  # groups leave theirs in one
    assert handles[0].shape[0] > 1
    x, energy = y.clone().requires_grad_(), plane.clone().requires_grad_()
    settings = (KEY.to(device), 2, 1, True)
    out = traced.add_noise(x, energy, own[0], *settings, handles[0], True)
    ((out * grad).sum() + (row.square()).sum()).backward()
    pull, of_log_var = reference.noise_gradients(grad, plane, log_var, *settings)
    torch.testing.assert_close(x.grad, grad)
    torch.testing.assert_close(energy.grad, pull, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(own[0].grad, of_log_var + 2 * log_var, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(own[1].grad, 2 * other)


WRITES = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

class Hopper:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0

driver.set_active(Hopper())
from torch._higher_order_ops.triton_kernel_wrap import get_mutated_tensors, kernel_side_table as table
from undrift.kernels.triton import kernels_halves as kernels, kernels_grouped, kernels_shared

def written(kernel, kinds, **constants):
    names = [name for name in kernel.arg_names if name not in constants]
    kinds = [*kinds, *[None] * (len(names) - len(kinds))]
    given = dict(zip(names, kinds))
    tensors = {n: torch.empty(64, dtype=kind) for n, kind in given.items() if kind is not None}
    numbers = {n: 32 for n, kind in given.items() if kind is None}
    place = table.add_constant_args(numbers | constants)
    return sorted(get_mutated_tensors(table.add_kernel(kernel), place, tensors, {}))

low, full, key = torch.bfloat16, torch.float32, torch.int64
noise = (low, full, full, key)
for last in (True, False):
    cut = dict(LAST=last, WIDE=False, BP=8, WIDTH=32, RUNS=1)
    assert written(kernels.add_noise_kernel, (*noise, low), **cut) == ["out_ptr"]
    assert written(kernels.add_noise_in_place_kernel, noise, **cut) == ["y_ptr"]
    assert written(kernels.noise_gradients_kernel, (*noise, full), **cut, SLOPED=False) == ["scratch_ptr"]
    found = written(kernels_shared.noise_parts_kernel, (*noise, full, full), **cut, SLOPED=True, APART=4)
    assert found == ["parts_ptr", "pulls_ptr"]
finish = dict(PLANE=64, BLOCKS=4, ROWS=8, WIDTH=4, APART=4, RUNS=1)
assert written(kernels.finish_kernel, [full] * 4, **finish) == ["grad_log_var_ptr", "grad_plane_ptr"]
pulls = dict(PLANE=64, BLOCKS=4, RUNS=1, APART=4)
assert written(kernels_shared.add_pulls_kernel, [full] * 3, **pulls) == ["grad_plane_ptr"]
assert written(kernels_shared.add_layers_kernel, [full] * 18, ROWS=8, COLUMNS=8) == ["out_ptr"]
assert written(kernels.apart_kernel, [full] * 2, BLOCK=64, APART=4) == ["out_ptr"]
some = dict(BP=16, TOGETHER=4, WIDTH=8)
assert written(kernels_grouped.grouped_add_noise_kernel, (*noise, low), **some) == ["out_ptr"]
found = written(kernels_grouped.grouped_noise_gradients_kernel, (*noise, full, full), **some)
assert found == ["grad_plane_ptr", "partial_ptr"]
"""


@triton
@pytest.mark.slow
def test_the_compiler_sees_what_kernels_write_and_no_more() -> None:
    """A tensor that it takes for written it copies first, or it cannot compile the graph at all."""
    ran = subprocess.run(
        [sys.executable, "-c", WRITES], env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr


@triton
@numpys
def test_noise_is_added_in_place_where_no_two_programs_share_a_cache_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from undrift.kernels.triton import traced

    device = kernels_device(monkeypatch)
    used: list[str] = []
    for name in ("add_noise_kernel", "add_noise_in_place_kernel"):
        kernel = getattr(traced, name)
        monkeypatch.setattr(traced, name, Named(kernel, name, used))
    monkeypatch.setattr(traced, "wrap_triton", lambda kernel: kernel)
    for channels, dtype in ((128, torch.bfloat16), (64, torch.float32), (64, torch.bfloat16), (160, torch.bfloat16)):
        y = torch.randn(2, 9, channels, device=device).to(dtype)
        plane, log_var = torch.rand(2, 9, 1, device=device), torch.zeros(channels, device=device)
        before = y.clone()
        got = traced.add_noise(y, plane, log_var, KEY.to(device), 0, 1, True)
        want = launch.add_noise(y, plane, log_var, KEY.to(device), 0, 1, True)
        assert torch.equal(got, want)
        assert torch.equal(y, before)
    place, other = "add_noise_in_place_kernel", "add_noise_kernel"
    assert used == [place, place, other, other]


class Named:
    """A kernel that notes its name when it is launched."""

    def __init__(self, kernel: object, name: str, used: list[str]) -> None:
        self.kernel, self.name, self.used = kernel, name, used

    def __getitem__(self, grid: object) -> object:
        self.used.append(self.name)
        return self.kernel[grid]  # type: ignore[index]
