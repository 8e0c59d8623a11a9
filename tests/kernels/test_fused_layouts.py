"""Memory order and precision change neither the noise nor, on a CPU, who draws it: it is drawn in pieces for all."""

import pytest
import torch
from torch import Tensor, nn

import undrift
from fused_support import KEY, arguments
from undrift.kernels import add_noise, choice, cpu, force, reference, square_sum

ORDERS = {4: torch.channels_last, 5: torch.channels_last_3d}
# shape, groups: an even and an odd number of channels, groups, depthwise, three dimensions, several pieces
CONVOLUTIONS = {
    "even": ((3, 6, 50, 70), 1),
    "odd": ((3, 5, 50, 70), 1),
    "grouped": ((2, 12, 30, 30), 3),
    "depthwise": ((2, 8, 30, 30), 8),
    "3d": ((2, 4, 9, 12, 13), 2),
    "pieces": ((5, 40, 50, 50), 1),
}
convolutions = pytest.mark.parametrize(("shape", "groups"), CONVOLUTIONS.values(), ids=CONVOLUTIONS)


def ordered(x: Tensor) -> Tensor:
    return x.to(memory_format=ORDERS[x.ndim])


def results(path: str, args: tuple[Tensor, ...], groups: int, last: bool = False) -> list[Tensor]:
    """Return the output of `add_noise` and all its gradients by one implementation."""
    y, plane, log_var = (v.detach().requires_grad_() for v in args[:3])
    with force(path):  # type: ignore[arg-type]
        out = add_noise(y, plane, log_var, KEY, 3, groups, last)
        grads = torch.autograd.grad(out, (y, plane, log_var), args[3])
    return [out.detach(), *grads]


@pytest.mark.parametrize("key", [KEY, torch.tensor(-1), torch.tensor(2**63 - 1)])
@pytest.mark.parametrize("first_row", [0, 2**20])
@convolutions
def test_channels_last_memory_holds_the_same_numbers(
    shape: tuple[int, ...], groups: int, first_row: int, key: Tensor
) -> None:
    y, plane, *_ = arguments(shape, groups, False)
    got = cpu.noise(ordered(y), plane, key, first_row, groups, False)
    assert torch.equal(got, cpu.noise(y, plane, key, first_row, groups, False))
    assert got.is_contiguous(memory_format=ORDERS[len(shape)])


@pytest.mark.parametrize("path", ["cpu", "operator"])
@pytest.mark.parametrize("pulled", [ordered, torch.Tensor.contiguous])
@convolutions
def test_channels_last_tensors_get_the_noise_of_others(
    shape: tuple[int, ...], groups: int, pulled: object, path: str
) -> None:
    """Whatever the memory order of the gradient that comes back."""
    y, plane, log_var, grad = arguments(shape, groups, False)
    args = (ordered(y), plane, log_var, pulled(grad))  # type: ignore[operator]
    assert choice.choose(*args[:3]) == "cpu"
    got = results(path, args, groups)
    assert got[0].stride() == args[0].stride()
    for one, want in zip(got, results("plain", (y, plane, log_var, grad), groups), strict=True):
        torch.testing.assert_close(one, want, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("order", [ordered, torch.Tensor.contiguous])
def test_other_precisions_are_served_too(dtype: torch.dtype, order: object) -> None:
    """In their own dtype, rounded once: as far from the plain one as a bit of theirs."""
    args = arguments((3, 6, 50, 70), 1, False, dtype)
    args = tuple(order(v) if v.shape == args[0].shape else v for v in args)  # type: ignore[operator]
    assert choice.choose(*args[:3]) == "cpu"
    got, want = results("cpu", args, 1), results("plain", args, 1)
    near = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float64: 1e-4}[dtype]
    for one, other in zip(got, want, strict=True):
        assert one.dtype is other.dtype
        torch.testing.assert_close(one, other, rtol=near, atol=1e-4)
    # Nearly all are the same: an output rounds otherwise where float32 differs by its last bit.
    assert dtype is torch.float64 or (got[0] == want[0]).float().mean() > 0.999


def test_tensors_with_holes_are_copied_once() -> None:
    """A slice, a transposed row of tokens: neither order, and drawn in pieces all the same."""
    y, plane, log_var, grad = arguments((4, 6, 30, 64), 1, False)
    args = (torch.stack([y, y], -1)[..., 0], plane, log_var, grad)
    tokens = arguments((40, 50, 10), 1, True)
    swapped = (tokens[0].transpose(0, 1).contiguous().transpose(0, 1), *tokens[1:])
    for given, dense, last in ((args, (y, *args[1:]), False), (swapped, tokens, True)):
        assert not given[0].is_contiguous()
        assert choice.choose(*given[:3]) == "cpu"
        for one, want in zip(results("cpu", given, 1, last), results("plain", dense, 1, last), strict=True):
            torch.testing.assert_close(one, want, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", [ordered, torch.Tensor.contiguous])
def test_the_sum_of_squares_keeps_the_input_as_it_is(dtype: torch.dtype, order: object) -> None:
    """Not twice it, in float32: and its gradient is the plain one's."""
    x = order(torch.randn(3, 12, 30, 30)).to(dtype).requires_grad_()  # type: ignore[operator]
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        total = square_sum(x, 3, False)
    assert [t.data_ptr() for t in saved] == [x.data_ptr()]
    want = reference.square_sum(x, 3, False)
    pull = torch.randn_like(want)
    got = torch.autograd.grad(total, x, pull)[0]
    assert got.dtype is dtype
    assert torch.equal(total, want)
    torch.testing.assert_close(got, torch.autograd.grad(want, x, pull)[0])


def test_a_network_in_channels_last_memory_is_the_same_network() -> None:
    def run(order: torch.memory_format) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, groups=2), nn.Flatten()
        )
        model = undrift.perturb(net.to(memory_format=order), init_fraction=0.1)  # type: ignore[call-overload]
        model.reseed(3)
        y = model(torch.rand(4, 3, 20, 20).to(memory_format=order))
        y.square().sum().backward()
        return [y.detach(), *(n.log_var.grad for n in model.noises())]

    for got, want in zip(run(torch.channels_last), run(torch.contiguous_format), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
