"""The fused noise: every implementation against the plain one, and the plain one against autograd and arithmetic."""

import copy
import importlib.util
import math
import warnings

import pytest
import torch
from torch import Tensor, nn

import undrift
from support import convnet, images
from undrift import layers
from undrift.fused import add_noise, cpu, dispatch, force, launch, layer, operators, plain, square_sum, tiles
from undrift.fused.epsilon import normal
from undrift.noise import _spec

KEY = torch.tensor(-987654321987654321)
# shape, groups, channels last
SHAPES = {
    "conv": ((3, 6, 5, 7), 1, False),
    "grouped 1d": ((2, 12, 9), 3, False),
    "depthwise 3d": ((2, 4, 3, 2, 3), 4, False),
    "one channel": ((2, 1, 3, 3), 1, False),
    "linear": ((5, 33), 1, True),
    "tokens": ((2, 7, 10), 1, True),
    "many pieces": ((3, 40, 50, 50), 2, False),
    "many rows": ((9, 200, 60), 1, True),
}
shapes = pytest.mark.parametrize(("shape", "groups", "last"), SHAPES.values(), ids=SHAPES)


def arguments(
    shape: tuple[int, ...], groups: int, last: bool, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    """Return y, a plane with zeros in it, log-variances, and a gradient."""
    torch.manual_seed(0)
    y = torch.randn(shape, dtype=dtype)
    plane = plain.square_sum(torch.relu(torch.randn(shape, dtype=dtype)), groups, last)
    plane[0].flatten()[0] = 0
    log_var = torch.randn(shape[-1] if last else shape[1], dtype=torch.promote_types(dtype, torch.float32))
    return y, plane, log_var, torch.randn(shape, dtype=dtype)


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
        assert dispatch.choose(*args[:3]) == path
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
    again = plain.noise_gradients(args[3], args[1], args[2], KEY, 3, groups, last)
    assert torch.equal(grad_y, args[3])
    torch.testing.assert_close(again[0], grad_plane, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(again[1], grad_log_var, rtol=1e-10, atol=1e-9)
    assert torch.isfinite(grad_plane).all()


def test_autograd_of_the_reference_is_right() -> None:
    y, plane, log_var, _ = (v.requires_grad_() for v in arguments((2, 4, 3), 2, False, torch.float64))
    plane.data.clamp_(min=0.1)  # finite differences at a root of 0 mean nothing
    assert torch.autograd.gradcheck(lambda *v: plain.add_noise(*v, KEY, 0, 2, False), (y, plane, log_var))
    assert torch.autograd.gradcheck(lambda x: plain.square_sum(x, 2, False), (y,))


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


@pytest.mark.parametrize("shape", [(3, 7), (2, 1), (1, 300_001), (70, 4001), (3, 2, 5, 140_000), (0, 4), (4, 0)])
@pytest.mark.parametrize("first_row", [0, 2**20])
def test_numpy_draws_what_pytorch_draws(shape: tuple[int, ...], first_row: int) -> None:
    got = cpu.normal(KEY, torch.Size(shape), first_row)
    torch.testing.assert_close(got, normal(KEY, shape, first_row), rtol=0, atol=3e-6)


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
    assert torch.equal(out, plain.add_noise(half.float(), plane, log_var, KEY, 0, 1, False).to(dtype))
    assert square_sum(half, 1, False).dtype is torch.float32


def test_the_operators_are_well_registered() -> None:
    y, plane, log_var, grad = (v.requires_grad_() for v in arguments((2, 4, 3, 3), 2, False))
    torch.library.opcheck(operators.square_sum, (y, 2, False))
    torch.library.opcheck(operators.add_noise, (y, plane, log_var, KEY, 0, 2, False))
    settings = (grad.detach(), plane.detach(), log_var.detach(), KEY, 0, 2, False)
    torch.library.opcheck(operators.noise_gradients, settings)


def test_fake_tensors_see_one_operator() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        y, plane, log_var, key = (mode.from_tensor(v) for v in (*arguments((2, 4, 3, 3), 2, False)[:3], KEY))
        assert dispatch.choose(y, plane) == "operator"
        assert add_noise(y, plane, log_var, key, 0, 2, False).shape == y.shape
        assert square_sum(y, 2, False).shape == (2, 2, 3, 3)


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


def test_falling_back_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "has_triton", lambda: False)
    monkeypatch.setattr(dispatch, "_said", set())
    with pytest.warns(undrift.UndriftWarning, match="Triton is not installed"):
        assert dispatch._on_cuda(torch.zeros(2)) == "plain"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dispatch._on_cuda(torch.zeros(2)) == "plain"
    monkeypatch.setattr(dispatch, "has_triton", lambda: True)
    assert dispatch._on_cuda(torch.zeros(2)) == "triton"
    with pytest.warns(undrift.UndriftWarning, match="float64"):
        assert dispatch._on_cuda(torch.zeros(2, dtype=torch.float64)) == "plain"


def test_an_unknown_implementation_is_an_error() -> None:
    with pytest.raises(undrift.UndriftError, match="no implementation 'fast'"), force("fast"):  # type: ignore[arg-type]
        pass


triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
# Triton's interpreter, of numpy.
numpys = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")


@pytest.fixture(params=["many programs", "one program"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Return the GPU where there is one, else a CPU for Triton's interpreter; with one program, all loops loop."""
    monkeypatch.setattr(launch, "_sums", {})
    monkeypatch.setattr(launch, "_noises", {})
    monkeypatch.setattr(layer, "_plans", {})
    if request.param == "one program":
        monkeypatch.setattr(tiles, "processors", lambda _index: 1)
        monkeypatch.setattr(tiles, "_PROGRAMS", 1)
        monkeypatch.setattr(tiles, "_TILE", 64)
        monkeypatch.setattr(tiles, "_PAIRS", 64)
        monkeypatch.setattr(launch, "ADDING", 1)
        monkeypatch.setattr(launch, "SUMMING", 1)
    if torch.cuda.is_available():
        return torch.device("cuda")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return torch.device("cpu")


def in_orders(y: Tensor) -> list[Tensor]:
    """Return a tensor in each memory order that its kind has."""
    order = {4: torch.channels_last, 5: torch.channels_last_3d}.get(y.ndim)
    return [y] if order is None else [y, y.to(memory_format=order)]


@triton
@numpys
@shapes
def test_triton_kernels(device: torch.device, shape: tuple[int, ...], groups: int, last: bool) -> None:
    if device.type == "cpu" and math.prod(shape) > 10_000:
        pytest.skip("the interpreter is slow")
    y, plane, log_var, grad = (v.to(device) for v in arguments(shape, groups, last))
    settings = (KEY.to(device), 3, groups, last)
    for v in in_orders(y):
        torch.testing.assert_close(launch.square_sum(v, groups, last), plain.square_sum(v, groups, last))
        pull = launch.square_sum_gradient(plane, v, groups, last)
        assert pull.stride() == v.stride()
        torch.testing.assert_close(pull, plain.square_sum_gradient(plane, v, groups, last))
        out = launch.add_noise(v, plane, log_var, *settings)
        assert out.stride() == v.stride()
        want = plain.add_noise(v, plane, log_var, *settings)
        # NVIDIA's own logarithm is right to 2^-22, so a radius near 0 is not right to as many bits as a large one.
        near = 1e-4 + 2**-16 * float((want - v).abs().max())
        torch.testing.assert_close(out, want, rtol=1e-4, atol=near)
    for v in in_orders(grad):
        got, want = (m.noise_gradients(v, plane, log_var, *settings) for m in (launch, plain))
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)  # sums of what is right to the bits above


@triton
@shapes
def test_the_compiled_sum_of_squares_and_its_gradient(shape: tuple[int, ...], groups: int, last: bool) -> None:
    from undrift.fused import traced

    x = arguments(shape, groups, last)[0]
    mine, plains = (x.clone().requires_grad_() for _ in range(2))
    got, want = traced.square_sum(mine, groups, last), plain.square_sum(plains, groups, last)
    pull = torch.randn_like(want)
    got.backward(pull)
    want.backward(pull)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(mine.grad, plains.grad)


def test_symbols_stay_symbols() -> None:
    """A graph for any batch must not be made one for the batch it was traced with."""
    from torch._dynamo.source import ConstantSource
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)
    for size, last in (((8, 5, 6), True), ((8, 4, 6, 6), False)):
        any_size = StatelessSymbolicContext([DimDynamic.DYNAMIC] * len(size))
        y = mode.from_tensor(torch.empty(size), symbolic_context=any_size, source=ConstantSource(f"y{last}"))
        assert not isinstance(tiles.shape_of(y, last).positions, int)
        launch.first_of(y, 2, last)
    assert not [guard for guard in shapes.guards if "Eq" in str(guard.expr)]


LAYERS = {
    "3×3": (nn.Conv2d(6, 8, 3, padding=1), (2, 6, 5, 5), 0.0),
    "strided, offset": (nn.Conv2d(6, 4, 3, stride=2, padding=1), (2, 6, 6, 5), 0.25),
    "1×1": (nn.Conv2d(6, 10, 1), (2, 6, 4, 4), 0.0),
    "1×1 strided": (nn.Conv2d(6, 10, 1, stride=2), (2, 6, 4, 4), 0.5),
    "grouped, offset": (nn.Conv2d(6, 9, 3, padding=1, groups=3), (2, 6, 4, 4), 0.5),
    "odd": (nn.Conv2d(4, 5, 2), (2, 4, 4, 4), 0.0),
    "vectors": (nn.Linear(6, 10), (5, 6), 0.5),
    "tokens": (nn.Linear(6, 7), (2, 5, 6), 0.0),
}


@triton
@numpys
@pytest.mark.parametrize("name", LAYERS)
def test_a_layers_noise_as_one_node(device: torch.device, name: str) -> None:
    """Outputs and all gradients against the plain functions one by one, in both memory orders."""
    module, shape, offset = LAYERS[name]
    spec = _spec(module, offset)[0]
    assert spec is not None
    torch.manual_seed(0)
    start = torch.relu(torch.randn(shape)).to(device)
    with torch.no_grad():
        plain_y = module.to(device)(start)
    log_var, key = torch.randn(plain_y.shape[-1 if spec.last else 1], device=device), KEY.to(device)

    def run(x: Tensor, y: Tensor, quick: bool) -> list[Tensor]:
        leaves = [v.clone().requires_grad_() for v in (x, y, log_var)]
        if quick:
            out = layer.noisy(leaves[0], leaves[1], leaves[2], key, 2, spec)
            assert out is not None
        else:
            energy = plain.square_sum(leaves[0], spec.groups, spec.last) + spec.extra
            plane = layers.box(module, energy, y.shape)
            out = plain.add_noise(leaves[1], plane, leaves[2], key, 2, spec.groups, spec.last)
        (out * out.detach().cos()).sum().backward()
        return [out.detach(), *(v.grad for v in leaves)]

    for x, y in zip(in_orders(start), in_orders(plain_y), strict=True):
        for got, want in zip(run(x, y, True), run(x, y, False), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        with torch.no_grad():
            silent = layer.noisy(x, y, torch.full_like(log_var, -torch.inf), key, 2, spec)
        assert torch.equal(silent, y)


def test_a_layers_noise_needs_dense_tensors_it_knows() -> None:
    x, log_var, spec = torch.zeros(2, 4, 6, 6), torch.zeros(4), layer.Spec(False, 1, (), 0.0)
    assert layer.noisy(x[..., ::2], x[..., ::2], log_var, KEY, 0, spec) is None
    assert layer.noisy(x.double(), x.double(), log_var, KEY, 0, spec) is None
    assert layer.noisy(x[:0], x[:0], log_var, KEY, 0, spec) is None


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("channels", [2, 16, 24, 80, 160, 192, 320, 500, 1024])
@pytest.mark.parametrize("positions", [1, 49, 3136, 204_800])
def test_tiles_cover_everything_once(positions: int, channels: int, last: bool) -> None:
    shape = tiles.Shape(positions, 1, channels, last)
    for cut in (tiles.tile(shape, channels, 132), tiles.pair_tile(shape, channels, 132, 6)):
        assert cut.positions & (cut.positions - 1) == 0
        assert cut.width & (cut.width - 1) == 0
        assert 1 <= cut.programs[0] <= tiles.cdiv(positions, cut.positions)
        assert 1 <= cut.programs[1] <= tiles.cdiv(channels, cut.width)
        if last and channels % 32 == 0:
            assert channels % cut.width == 0  # no empty columns
    assert cut.programs[1] == tiles.cdiv(channels, cut.width)  # columns are not looped over
    assert cut.programs[0] * cut.programs[1] <= max(6 * 132, cut.programs[1])  # no more than fit at once
    whole = tiles.tile(shape, channels, 132)
    assert whole.programs[0] == tiles.cdiv(positions, whole.positions)  # nor are positions


@triton
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the compiler asks for a GPU")
@pytest.mark.parametrize(("groups", "channels"), [(1, 8), (1, 5), (2, 6)])
def test_a_graph_compiled_for_a_gpu_draws_the_same_noise(groups: int, channels: int) -> None:
    x = torch.rand(4, 4, 6, 6, device="cuda")
    module = nn.Conv2d(4, channels, 3, padding=1, groups=groups)

    def run(compiled: bool) -> list[Tensor]:
        model = undrift.perturb(nn.Sequential(copy.deepcopy(module)).cuda(), init_fraction=0.1)
        model.reseed(3)
        leaf = x.clone().requires_grad_()
        out = (torch.compile(model, fullgraph=True) if compiled else model)(leaf)
        out.square().sum().backward()
        return [out.detach(), leaf.grad, *(n.log_var.grad for n in model.noises())]

    for got, want in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


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
