"""The fused noise: every implementation against the plain one, and the plain one against autograd and arithmetic."""

import pytest
import torch
from torch import Tensor, nn

import undrift
from fused_support import KEY, arguments, shapes
from support import convnet, images
from undrift.kernels import add_noise, choice, cpu, force, operators, reference, square_sum
from undrift.kernels.epsilon import key_of_use, keys_of, normal


def results(path: str, args: tuple[Tensor, ...], groups: int, last: bool, first_row: int = 3) -> list[Tensor]:
    """Return the output of `add_noise` and all its gradients by one implementation."""
    y, plane, log_var = (v.clone().requires_grad_() for v in args[:3])
    with force(path):  # type: ignore[arg-type]
        out = add_noise(y, plane, log_var, KEY, first_row, groups, last)
        out.backward(args[3])
    return [out.detach(), y.grad, plane.grad, log_var.grad]


@shapes
@pytest.mark.parametrize("path", ["cpu", "operator"])
def test_every_implementation_adds_the_same_noise(path: str, shape: tuple[int, ...], groups: int, last: bool) -> None:
    args = arguments(shape, groups, last)
    with force(path):  # type: ignore[arg-type]
        assert choice.choose(*args[:3]) == path
    for got, want in zip(results(path, args, groups, last), results("plain", args, groups, last), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@shapes
@pytest.mark.parametrize("path", ["cpu", "operator"])
def test_every_implementation_sums_the_same_squares(path: str, shape: tuple[int, ...], groups: int, last: bool) -> None:
    def run(by: str) -> list[Tensor]:
        torch.manual_seed(0)
        x = torch.randn(shape, requires_grad=True)
        with force(by):  # type: ignore[arg-type]
            total = square_sum(x, groups, last)
        total.square().sum().backward()
        return [total.detach(), x.grad]

    for got, want in zip(run(path), run("plain"), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)


@shapes
def test_gradients_drawn_again_are_autograds(shape: tuple[int, ...], groups: int, last: bool) -> None:
    """In float64: ε itself is float32, the same in both."""
    args = arguments(shape, groups, last, torch.float64)
    _, grad_y, grad_plane, grad_log_var = results("plain", args, groups, last)
    again = reference.noise_gradients(args[3], args[1], args[2], KEY, 3, groups, last)
    assert torch.equal(grad_y, args[3])
    torch.testing.assert_close(again[0], grad_plane, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(again[1], grad_log_var, rtol=1e-10, atol=1e-9)
    assert torch.isfinite(grad_plane).all()


def test_autograd_of_the_reference_is_right() -> None:
    y, plane, log_var, _ = (v.requires_grad_() for v in arguments((2, 4, 3), 2, False, torch.float64))
    plane.data.clamp_(min=0.1)  # finite differences at a root of 0 mean nothing
    assert torch.autograd.gradcheck(lambda *v: reference.add_noise(*v, KEY, 0, 2, False), (y, plane, log_var))
    assert torch.autograd.gradcheck(lambda x: reference.square_sum(x, 2, False), (y,))


@pytest.mark.parametrize("path", ["plain", "cpu", "operator"])
def test_no_variance_or_no_energy_is_no_noise(path: str) -> None:
    y, plane, log_var, grad = arguments((3, 6, 5, 7), 1, False)
    silent = torch.full_like(log_var, -torch.inf)
    out, _, grad_plane, grad_log_var = results(path, (y, plane, silent, grad), 1, False)
    assert torch.equal(out, y)
    assert not grad_log_var.any()
    assert not grad_plane.any()
    out, _, grad_plane, _ = results(path, (y, torch.zeros_like(plane), log_var, grad), 1, False)
    assert torch.equal(out, y)
    assert not grad_plane.any()


@pytest.mark.parametrize("path", ["plain", "cpu"])
def test_a_batch_may_be_split_anywhere(path: str) -> None:
    y, plane, log_var, _ = arguments((6, 4, 30, 30), 2, False)
    with force(path):  # type: ignore[arg-type]
        whole = add_noise(y, plane, log_var, KEY, 0, 2, False)
        part = add_noise(y[2:5].contiguous(), plane[2:5].contiguous(), log_var, KEY, 2, 2, False)
    torch.testing.assert_close(whole[2:5], part, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(3, 7), (2, 1), (1, 300_001), (70, 4001), (0, 4), (4, 0)])
@pytest.mark.parametrize("first_row", [0, 2**20])
def test_pieces_draw_what_the_definition_draws(shape: tuple[int, ...], first_row: int) -> None:
    got = torch.empty(*shape, 1)
    cpu.fill(got, KEY, first_row)
    torch.testing.assert_close(got.view(shape), normal(KEY, shape, first_row), rtol=0, atol=5e-6)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_nothing(threads: int) -> None:
    args = arguments((9, 30, 48, 48), 1, False)
    want = results("cpu", args, 1, False)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = results("cpu", args, 1, False)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_memory_format_changes_nothing() -> None:
    y, plane, log_var, _ = arguments((3, 6, 5, 7), 1, False)
    want = add_noise(y, plane, log_var, KEY, 0, 1, False)
    got = add_noise(y.to(memory_format=torch.channels_last), plane, log_var, KEY, 0, 1, False)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    y, plane, log_var, _ = arguments((3, 6, 5, 7), 1, False)
    half = y.to(dtype)
    out = add_noise(half, plane, log_var, KEY, 0, 1, False)
    assert out.dtype is dtype
    assert torch.equal(out, reference.add_noise(half.float(), plane, log_var, KEY, 0, 1, False).to(dtype))
    assert square_sum(half, 1, False).dtype is torch.float32


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # from opcheck, in torch 2.15
def test_the_operators_are_well_registered() -> None:
    y, plane, log_var, grad = (v.requires_grad_() for v in arguments((2, 4, 3, 3), 2, False))
    torch.library.opcheck(operators.square_sum, (y, 2, False))
    torch.library.opcheck(operators.add_noise, (y, plane, log_var, KEY, 0, 2, False))
    settings = (grad.detach(), plane.detach(), log_var.detach(), KEY, 0, 2, False)
    torch.library.opcheck(operators.noise_gradients, settings)


def test_the_operator_for_keys_is_well_registered() -> None:
    """It gives a step's keys, and what an uncompiled pass makes of them for later uses of a weight."""
    seed, step = torch.tensor(-123456789123), torch.tensor(7)
    for count in (0, 2, 54):
        torch.library.opcheck(operators.keys, (seed, step, count, 3))
        for use, row in enumerate(operators.keys(seed, step, count, 3)):
            assert torch.equal(row, key_of_use(keys_of(seed, step, count), use))


def test_fake_tensors_see_one_operator() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        y, plane, log_var, key = (mode.from_tensor(v) for v in (*arguments((2, 4, 3, 3), 2, False)[:3], KEY))
        assert choice.choose(y, plane) == "operator"
        assert add_noise(y, plane, log_var, key, 0, 2, False).shape == y.shape
        assert square_sum(y, 2, False).shape == (2, 2, 3, 3)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["plain", "operator"])
def test_a_compiled_network_may_use_either(path: str) -> None:
    model = undrift.perturb(convnet(), norm_statistics="source", init_fraction=0.1)
    model.reseed(3)
    want = model(images())
    torch._dynamo.reset()
    with force(path):  # type: ignore[arg-type]
        call = torch.compile(model, fullgraph=True, backend="aot_eager_decomp_partition")
        model.reseed(3)
        got = call(images())
        got.square().sum().backward()
    torch._dynamo.reset()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert all(n.log_var.grad.abs().sum() > 0 for n in model.noises())


def test_a_second_derivative_is_refused() -> None:
    y, plane, log_var, _ = arguments((3, 40, 20, 20), 1, False)
    plane.requires_grad_()
    out = add_noise(y, plane, log_var, KEY, 0, 1, False)
    (first,) = torch.autograd.grad(out.square().sum(), plane, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_an_unknown_implementation_is_an_error() -> None:
    with pytest.raises(undrift.UndriftError, match="no implementation 'fast'"), force("fast"):  # type: ignore[arg-type]
        pass


def test_the_whole_network_trains_alike_on_either() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, stride=2, padding=1, groups=2)
            self.c = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.relu(self.b(torch.relu(self.a(x))))
            return self.c(y.flatten(2).transpose(1, 2)).mean(1)

    def run(path: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = undrift.perturb(Net(), init_fraction=0.1, generator=torch.Generator().manual_seed(1))
        x = torch.rand(4, 3, 32, 32)
        with force(path):  # type: ignore[arg-type]
            y = model(x)
            y.square().sum().backward()
        return [y.detach(), *(n.log_var.grad for n in model.noises())]

    for got, want in zip(run("cpu"), run("plain"), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
