"""Triton's kernels against the plain functions: on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1)."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import undrift
from fused_support import KEY, arguments, in_orders, kernels_device, numpys, shapes, triton
from undrift.kernels import reference
from undrift.kernels.triton import launch, tiles, windows


@pytest.fixture(params=["many programs", pytest.param("one program", marks=pytest.mark.slow)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    return kernels_device(monkeypatch, request.param)


@triton
@numpys
@shapes
def test_triton_kernels(device: torch.device, shape: tuple[int, ...], groups: int, last: bool) -> None:
    if device.type == "cpu" and math.prod(shape) > 10_000:
        pytest.skip("the interpreter is slow")
    y, plane, log_var, grad = (v.to(device) for v in arguments(shape, groups, last))
    settings = (KEY.to(device), 3, groups, last)
    for v in in_orders(y):
        torch.testing.assert_close(launch.square_sum(v, groups, last), reference.square_sum(v, groups, last))
        pull = launch.square_sum_gradient(plane, v, groups, last)
        assert pull.stride() == v.stride()
        torch.testing.assert_close(pull, reference.square_sum_gradient(plane, v, groups, last))
        out = launch.add_noise(v, plane, log_var, *settings)
        assert out.stride() == v.stride()
        want = reference.add_noise(v, plane, log_var, *settings)
        # The cosine's polynomial is right to 7e-6, NVIDIA's own to 5e-7: a small ε is off by as much as a large one.
        near = 1e-4 + 2**-16 * float((want - v).abs().max())
        torch.testing.assert_close(out, want, rtol=1e-4, atol=near)
    for v in in_orders(grad):
        got, want = (m.noise_gradients(v, plane, log_var, *settings) for m in (launch, reference))
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)  # sums of what is right to the bits above


@triton
@shapes
def test_the_compiled_sum_of_squares_and_its_gradient(shape: tuple[int, ...], groups: int, last: bool) -> None:
    from undrift.kernels.triton import traced

    x = arguments(shape, groups, last)[0]
    mine, plains = (x.clone().requires_grad_() for _ in range(2))
    got, want = traced.square_sum(mine, groups, last), reference.square_sum(plains, groups, last)
    pull = torch.randn_like(want)
    got.backward(pull)
    want.backward(pull)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(mine.grad, plains.grad)


@triton
@numpys
@pytest.mark.parametrize(("shape", "last"), [((3, 6, 5, 7), False), ((2, 7, 10), True)])
def test_compiled_gradients_of_the_plane_have_gaps(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], last: bool
) -> None:
    """The numbers of the plain functions, 16 bytes apart where a batch norm may read them."""
    from undrift.kernels.triton import traced

    device = kernels_device(monkeypatch)
    _, plane, log_var, grad = (t.to(device) for t in arguments(shape, 1, last))
    given = (grad, plane, log_var, KEY.to(device), 2, 1, last)
    got, want = traced.noise_gradients(*given), reference.noise_gradients(*given)
    for own, other in zip(got, want, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-3, atol=1e-3)
    spread = traced.apart(plane)
    assert spread.equal(plane)
    assert spread.stride() == tuple(4 * step for step in plane.stride())
    assert got[0].stride() == (plane if last else spread).stride()


@triton
def test_the_compiler_looks_into_the_sum_of_squares() -> None:
    """And traces it without a warning: warnings are errors here, as they may be with a user."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    from undrift.kernels.triton import traced

    seen: list[str] = []

    def compiler(graph: torch.fx.GraphModule, _inputs: object) -> object:
        seen.append(graph.code)
        return make_boxed_func(graph.forward)

    x = torch.rand(2, 4, 3, 3, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(traced.square_sum, fullgraph=True, backend=aot_autograd(fw_compiler=compiler))
    compiled(x, 2, False).sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())
    assert len(seen) == 2  # forwards and backwards
    assert not [code for code in seen if "undrift" in code]


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
        launch.first_of(y.shape, 2, last)
    assert not [guard for guard in shapes.guards if "Eq" in str(guard.expr)]


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("pairs", [launch.ADDING, launch.SUMMING, windows.WINDOWED], ids=["add", "sum", "windowed"])
def test_tiles_cover_everything_once(last: bool, pairs: tiles.Cut) -> None:
    for positions in (1, 49, 3136, 204_800):
        for channels in (2, 16, 24, 80, 160, 192, 320, 500, 1024):
            covers(positions, channels, last, pairs)


def covers(positions: int, channels: int, last: bool, pairs: tiles.Cut) -> None:
    shape = tiles.Shape(positions, 1, channels, last)
    for cut in (tiles.tile(shape, channels, 132), tiles.pair_tile(shape, channels, 132, pairs)):
        assert cut.positions & (cut.positions - 1) == 0
        assert cut.width & (cut.width - 1) == 0
        assert 1 <= cut.programs[0] <= tiles.cdiv(positions, cut.positions)
        assert 1 <= cut.programs[1] <= tiles.cdiv(channels, cut.width)
        if last and channels % 32 == 0:
            assert channels % cut.width == 0  # no empty columns
    assert cut.programs[1] == tiles.cdiv(channels, cut.width)  # columns are not looped over
    most = pairs.fit.get(cut.width, min(pairs.fit.values())) * 132
    assert cut.programs[0] * cut.programs[1] <= max(most, cut.programs[1])  # no more than fit at once
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
