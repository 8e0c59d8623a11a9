"""Triton's kernels against the plain functions: on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1)."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import undrift
from fused_support import KEY, arguments, in_orders, kernels_device, numpys, shapes, triton
from undrift.kernels import reference
from undrift.kernels.triton import folded, launch, layer, tiles
from undrift.posterior import layers, noise


@pytest.fixture(params=["many programs", "one program"])
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
    spec = layer.spec_of(module, offset)[0]
    assert spec is not None
    torch.manual_seed(0)
    module.cpu().reset_parameters()
    start = torch.relu(torch.randn(shape)).to(device)
    with torch.no_grad():
        plain_y = module.to(device)(start)
    # Drawn, and not made of the output: times noise as large as here, the cosine's last bits would be more than that.
    pulls = in_orders(torch.randn(plain_y.shape).to(device))
    log_var, key = torch.randn(plain_y.shape[-1 if spec.last else 1]).to(device), KEY.to(device)

    def run(x: Tensor, y: Tensor, pull: Tensor, quick: bool) -> list[Tensor]:
        leaves = [v.clone().requires_grad_() for v in (x, y, log_var)]
        if quick:
            out = layer.noisy(leaves[0], leaves[1], leaves[2], key, layer._make(*leaves, 2, spec))
        else:
            energy = reference.square_sum(leaves[0], spec.groups, spec.last) + spec.extra
            plane = layers.box(module, energy, y.shape)
            out = reference.add_noise(leaves[1], plane, leaves[2], key, 2, spec.groups, spec.last)
        out.backward(pull)
        return [out.detach(), *(v.grad for v in leaves)]

    for x, y, pull in zip(in_orders(start), in_orders(plain_y), pulls, strict=True):
        for got, want in zip(run(x, y, pull, True), run(x, y, pull, False), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        with torch.no_grad():
            silent = torch.full_like(log_var, -torch.inf)
            silent = layer.noisy(x, y, silent, key, layer._make(x, y, silent, 2, spec))
        assert torch.equal(silent, y)


def test_a_layers_noise_needs_dense_tensors_it_knows() -> None:
    x, log_var, spec = torch.zeros(2, 4, 6, 6), torch.zeros(4), layer.Spec(False, 1, (), 0.0)
    assert layer._make(x[..., ::2], x[..., ::2], log_var, 0, spec) is None
    assert layer._make(x.double(), x.double(), log_var, 0, spec) is None
    assert layer._make(x[:0], x[:0], log_var, 0, spec) is None


def test_a_plan_follows_what_its_layer_and_tensors_have_become(monkeypatch: pytest.MonkeyPatch) -> None:
    """What changes between two calls, also where no size tells of it, makes another plan; what does not, makes none."""
    made: list[tuple[object, ...]] = []
    monkeypatch.setattr(layer, "_plans", {})
    monkeypatch.setattr(layer, "_make", lambda *args: made.append(args[3:]))
    module, x, log_var = nn.Conv2d(4, 4, 1, padding=0), torch.zeros(2, 4, 6, 6), torch.zeros(4)

    def plans(x: Tensor = x, y: Tensor = x, log_var: Tensor = log_var, offset: float = 0.0, rank: int = 0) -> int:
        before = len(made)
        for _ in range(2):
            layer.plan_of(module, x, y, log_var, offset, rank)
        return len(made) - before

    assert (plans(), plans(x.clone())) == (1, 0)
    last = x.to(memory_format=torch.channels_last)
    changes = ({"x": last}, {"y": last}, {"x": x.half()}, {"y": x.half()}, {"log_var": log_var.half()}, {"offset": 0.5})
    assert [plans(**change) for change in changes] == [1] * len(changes)
    for name, value in (("kernel_size", (3, 3)), ("padding", (1, 1)), ("stride", (2, 2))):
        setattr(module, name, value)
        assert (plans(), plans()) == (1, 0)
    assert made[-1] == (0, layer.Spec(False, 1, ((3, 3), (2, 2), (1, 1)), 0.0))
    assert plans(rank=3) == 1
    assert made[-1][0] == 3 * 2  # the first row of the third rank's batch of two
    module.dilation = (2, 2)
    assert plans() == 0  # no box filter of pooling


class Twice(nn.Module):
    """A layer used twice, and a head that sees one token of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        x = self.body(torch.tanh(checkpoint(self.body, x, use_reentrant=False)))
        return self.head(x.flatten(2).transpose(1, 2).contiguous()[:, 1])


@triton
@numpys
def test_a_network_of_such_nodes_is_the_longer_ways(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps, between which a stride changes; a checkpoint; a copy; noise off in between; half precision after."""
    x = torch.rand(2, 3, 8, 8, device=device)

    def run(quick: bool) -> list[Tensor]:
        nodes: list[object] = []
        monkeypatch.setattr(noise, "quick", lambda _x, _y: quick)
        monkeypatch.setattr(noise, "noisy", lambda *args: nodes.append(args) or layer.noisy(*args))
        torch.manual_seed(0)
        made = undrift.perturb(Twice().to(device), linear_sharing="kernel", init_fraction=0.1)
        made.reseed(3)
        made(x)
        model = copy.deepcopy(made)
        found = []
        for stride in (1, 2):
            model.net.body.stride = (stride, stride)
            with model.mean():
                found.append(model(x))
            out = model(x)
            assert not torch.allclose(found[-1], out, atol=1e-2)
            out.square().sum().backward()
            found += [out, *(n.log_var.grad.clone() for n in model.noises())]
        model.net.body.stride = (1, 1)
        found.append(model.bfloat16()(x.bfloat16()))
        # A checkpointed layer runs again in the backward pass. The long way is taken by none, or by all.
        assert len(nodes) == (4 + 2 * 5 + 4 if quick else 0)
        return [v.detach() for v in found]

    for got, want in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3 if got.dtype is torch.float32 else 1e-2)


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("channels", [2, 16, 24, 80, 160, 192, 320, 500, 1024])
@pytest.mark.parametrize("positions", [1, 49, 3136, 204_800])
@pytest.mark.parametrize("pairs", [launch.ADDING, launch.SUMMING, folded.WINDOWED], ids=["add", "sum", "windowed"])
def test_tiles_cover_everything_once(positions: int, channels: int, last: bool, pairs: tiles.Cut) -> None:
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
