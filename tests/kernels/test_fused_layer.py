"""A layer's noise as one node against the plain functions, window by window: on a GPU, or in Triton's interpreter."""

import copy

import pytest
import torch
from torch import Tensor, nn

from fused_support import KEY, in_orders, kernels_device, numpys, triton
from undrift.kernels import reference
from undrift.kernels.triton import launch, layer, tiles, windows
from undrift.posterior import layers

# A layer, its input, a constant energy, and the launches it takes: forward, backward, backward without grad of x.
CASES: dict[str, tuple[nn.Module, tuple[int, ...], float, tuple[int, int, int]]] = {
    "1×1": (nn.Conv2d(6, 10, 1), (2, 6, 4, 3), 0.5, (2, 2, 2)),
    "1×1 strided": (nn.Conv2d(6, 10, 1, stride=3), (2, 6, 8, 5), 0.5, (2, 2, 2)),
    "3×3": (nn.Conv2d(6, 8, 3, padding=1), (2, 6, 5, 7), 0.25, (2, 2, 2)),
    "3×3 without padding": (nn.Conv2d(5, 4, 3), (2, 5, 6, 4), 0.25, (2, 2, 2)),
    "3×3 strided": (nn.Conv2d(6, 4, 3, stride=2, padding=1), (2, 6, 6, 5), 0.25, (2, 2, 2)),
    "3×3 with gaps": (nn.Conv2d(4, 6, 3, stride=(4, 5), padding=1), (2, 4, 9, 12), 0.5, (2, 2, 2)),
    "2×2": (nn.Conv2d(4, 4, 2, padding=1), (2, 4, 4, 5), 0.5, (2, 2, 2)),
    "2×2 strided": (nn.Conv2d(4, 4, 2, stride=2), (2, 4, 5, 7), 0.5, (2, 2, 2)),
    "3×1": (nn.Conv2d(4, 6, (3, 1), stride=(1, 2), padding=(1, 0)), (2, 4, 5, 6), 0.5, (2, 2, 2)),
    "1×4": (nn.Conv2d(4, 6, (1, 4), stride=(2, 1), padding=(0, 2)), (2, 4, 5, 6), 0.5, (2, 2, 2)),
    "3×2": (nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(0, 1)), (2, 4, 7, 4), 0.5, (2, 2, 2)),
    "patches": (nn.Conv2d(3, 8, 4, stride=4), (2, 3, 8, 13), 0.5, (3, 2, 2)),
    "5×5": (nn.Conv2d(4, 6, 5, padding=2), (2, 4, 7, 6), 0.5, (3, 4, 2)),
    "2×5": (nn.Conv2d(4, 6, (2, 5), padding=(0, 2)), (2, 4, 5, 6), 0.5, (3, 4, 2)),
    "5×5 strided": (nn.Conv2d(4, 6, 5, stride=2, padding=1), (2, 4, 9, 8), 0.5, (3, 2, 2)),
    "7×7": (nn.Conv2d(3, 4, 7, stride=2, padding=3), (2, 3, 13, 10), 0.5, (3, 4, 2)),
    "blocks of channels": (nn.Conv2d(3, 140, 3, padding=1), (1, 3, 4, 5), 0.0, (2, 2, 2)),
    "many inputs": (nn.Conv2d(70, 2, 3, padding=1), (1, 70, 3, 3), 0.0, (2, 2, 2)),
    "many parts": (nn.Conv2d(2, 4, 3, padding=1), (2, 2, 6, 7), 0.0, (2, 2, 2)),
    "vectors": (nn.Linear(6, 10), (5, 6), 0.5, (2, 2, 2)),
    "tokens": (nn.Linear(7, 14), (2, 5, 7), 0.0, (2, 2, 2)),
    "a field of vectors": (nn.Linear(5, 136), (2, 3, 2, 5), 0.0, (2, 2, 2)),
    "many vectors": (nn.Linear(3, 128), (1100, 3), 0.5, (1, 2, 2)),
    "grouped": (nn.Conv2d(6, 12, 3, padding=1, groups=3), (2, 6, 4, 4), 0.5, (4, 4, 2)),
    "odd": (nn.Conv2d(4, 5, 3, padding=1), (2, 4, 4, 4), 0.5, (3, 4, 2)),
}
QUICK = ("3×3 strided", "tokens", "grouped")  # the rest of the grid is for `make test-all`
grid = pytest.mark.parametrize("name", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CASES])


class Setting:
    """A layer's tensors, with zeros among its inputs, and its noise by either way."""

    def __init__(self, name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        module, shape, offset, self.launches = CASES[name]
        self.module = copy.deepcopy(module)
        (last, groups), pool = layers.channels(self.module), layers.pool(self.module)
        assert pool is not None
        self.spec = layer.Geometry(groups, last, pool, offset * (shape[-1] if last else shape[1] // groups))
        draw = torch.Generator().manual_seed(0)
        start = torch.relu(torch.randn(shape, generator=draw) - 0.5)
        start[0, ..., :2] = 0  # windows without any energy have a root without a slope
        with torch.no_grad():
            outputs = self.module(start)
        self.start, self.y = start.to(device, dtype), outputs.to(device, dtype)
        # Drawn, not made of the output: times noise as large as here, the cosine's last bits would be more than that.
        self.grad = torch.randn(outputs.shape, generator=draw).to(device, dtype)
        self.log_var = torch.randn(outputs.shape[-1 if last else 1], generator=draw).to(device)
        self.key = KEY.to(device)

    def orders(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return input, output and its gradient in each memory order of theirs."""
        tensors = (self.start, self.y, self.grad)
        return [tensors] if self.spec.last else list(zip(*map(in_orders, tensors), strict=True))

    def leaves(self, x: Tensor, y: Tensor, with_x: bool = True) -> list[Tensor]:
        return [v.detach().clone().requires_grad_(with_x or v is not x) for v in (x, y, self.log_var)]

    def quick(self, leaves: list[Tensor]) -> Tensor:
        assert layer.fits(*leaves)
        return layer.add_noise(*leaves, self.key, self.spec, 2)

    def plain(self, leaves: list[Tensor]) -> Tensor:
        energy = reference.square_sum(leaves[0], self.spec.groups, self.spec.last) + self.spec.extra
        plane = layers.box(self.module, energy, self.y.shape)
        return reference.add_noise(leaves[1], plane, leaves[2], self.key, 2, self.spec.groups, self.spec.last)


@pytest.fixture(
    params=["many programs", *(pytest.param(how, marks=pytest.mark.slow) for how in ("one program", "small sums"))]
)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    return kernels_device(monkeypatch, request.param)


@triton
@numpys
@grid
def test_outputs_and_all_gradients(device: torch.device, name: str) -> None:
    if name == "many vectors" and device.type == "cpu" and tiles.processors(0) == 1:
        pytest.skip("the interpreter is slow, and to one multiprocessor five vectors are many")
    setting = Setting(name, device)
    for x, y, grad in setting.orders():
        mine, plains = setting.leaves(x, y), setting.leaves(x, y)
        got, want = setting.quick(mine), setting.plain(plains)
        assert got.stride() == y.stride()
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(got, y, atol=1e-2)
        got.backward(grad)
        want.backward(grad)
        for own, other in zip(mine, plains, strict=True):
            # Sums of terms up to ten; a GPU's own cosine and the plain functions' polynomial differ by 7e-6 in each.
            torch.testing.assert_close(own.grad, other.grad, rtol=1e-3, atol=1e-3)
        assert mine[0].grad.abs().max() > 0.1
        assert mine[0].grad.stride() == x.stride()


@triton
@numpys
@grid
def test_a_frozen_layers_own_gradient_is_added_to_the_noises(device: torch.device, name: str) -> None:
    """The node gives its input what autograd adds up of layer and noise; the layer's node is not asked."""
    if name == "many vectors" and device.type == "cpu" and tiles.processors(0) == 1:
        pytest.skip("the interpreter is slow, and to one multiprocessor five vectors are many")
    setting = Setting(name, device)
    module = setting.module.to(device).requires_grad_(False)
    for x, _, grad in setting.orders():
        mine, plains = (setting.leaves(x, x)[::2] for _ in range(2))
        y = module(mine[0])
        got = layer.add_noise(mine[0], y, mine[1], setting.key, setting.spec, 2, module.weight)
        want = setting.plain([plains[0], module(plains[0]), plains[1]])
        y.register_hook(pytest.fail)
        got.backward(grad)
        want.backward(grad)
        for own, other in zip((got, *(v.grad for v in mine)), (want, *(v.grad for v in plains)), strict=True):
            torch.testing.assert_close(own, other, rtol=1e-3, atol=1e-3)
        assert mine[0].grad.stride() == x.stride()


@triton
@numpys
@pytest.mark.slow
@pytest.mark.parametrize("name", ["3×3 strided", "tokens", "7×7"])
def test_a_layer_under_autocast_adds_its_gradient_in_lower_precision(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    setting = Setting(name, kernels_device(monkeypatch))
    module = setting.module.to(setting.start.device).requires_grad_(False)
    x = setting.start
    mine, plains = (setting.leaves(x, x)[::2] for _ in range(2))
    kind = x.device.type
    with torch.autocast(kind, torch.bfloat16):
        outputs = [module(leaves[0]) for leaves in (mine, plains)]
    got = layer.add_noise(mine[0], outputs[0], mine[1], setting.key, setting.spec, 2, module.weight)
    want = setting.plain([plains[0], outputs[1], plains[1]])
    assert got.dtype == want.dtype == torch.bfloat16
    got.backward(setting.grad.bfloat16())
    want.backward(setting.grad.bfloat16())
    for own, other in zip(mine, plains, strict=True):
        assert own.grad.dtype == torch.float32
        torch.testing.assert_close(own.grad, other.grad, rtol=2e-2, atol=2e-2)


@triton
@numpys
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["3×3", "3×3 strided", "tokens", "blocks of channels"])
def test_half_precision(monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype) -> None:
    setting = Setting(name, kernels_device(monkeypatch), dtype)
    for x, y, grad in setting.orders():
        mine, plains = setting.leaves(x, y), setting.leaves(x, y)
        got, want = setting.quick(mine), setting.plain(plains)
        got.backward(grad)
        want.backward(grad)
        assert got.dtype == dtype
        for own, other in zip((got, *(v.grad for v in mine)), (want, *(v.grad for v in plains)), strict=True):
            assert own.dtype == other.dtype
            torch.testing.assert_close(own, other, rtol=2e-2, atol=2e-2)


@triton
@numpys
@pytest.mark.slow
@pytest.mark.parametrize("name", ["1×1", "3×3", "7×7", "vectors", "odd"])
def test_an_input_without_gradient_changes_no_other(device: torch.device, name: str) -> None:
    setting = Setting(name, device)
    x, y, grad = setting.orders()[-1]
    found = []
    for with_x in (True, False):
        leaves = setting.leaves(x, y, with_x)
        setting.quick(leaves).backward(grad)
        found.append(leaves)
    assert found[0][0].grad is not None
    assert found[1][0].grad is None
    torch.testing.assert_close(found[0][1].grad, found[1][1].grad, rtol=0, atol=0)
    torch.testing.assert_close(found[0][2].grad, found[1][2].grad, rtol=1e-6, atol=1e-6)


@triton
@numpys
@pytest.mark.slow
@pytest.mark.parametrize("name", ["3×3", "blocks of channels", "many parts"])
def test_the_same_bits_each_time(device: torch.device, name: str) -> None:
    setting = Setting(name, device)
    x, y, grad = setting.orders()[-1]
    runs = []
    for _ in range(2):
        leaves = setting.leaves(x, y)
        out = setting.quick(leaves)
        out.backward(grad)
        runs.append([out.detach(), *(v.grad for v in leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@triton
@numpys
@grid
def test_how_many_launches_a_layer_takes(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Ours, and PyTorch's own box filters and sums; large windows, groups and odd channels take the longer way."""
    setting, seen = Setting(name, kernels_device(monkeypatch)), []
    launched, halved = launch.Launch.__call__, setting.spec.groups == 1 and len(setting.log_var) % 2 == 0
    monkeypatch.setattr(
        launch.Launch,
        "__call__",
        lambda self, *tensors: seen.append(self.kernel.fn.__name__) or launched(self, *tensors),
    )

    def count(with_x: bool) -> tuple[int, int]:
        leaves = setting.leaves(*setting.orders()[0][:2], with_x)
        seen.clear()
        out = setting.quick(leaves)
        assert ("add_noise_vectors_kernel" in seen) == (len(seen) == 1)
        apart = not {"add_noise_vectors_kernel", "add_noise_windowed_kernel"} & set(seen)
        forward = len(seen) + (apart and bool(setting.spec.pool)) + (setting.spec.groups > 1 and setting.spec.extra > 0)
        seen.clear()
        out.backward(setting.orders()[0][2])
        long = not {"finish_layer_kernel", "finish_log_var_kernel"} & set(seen)
        return forward, len(seen) + (with_x and long and bool(setting.spec.pool)) + (not halved)

    forward, backward, without_x = setting.launches
    assert count(True) == (forward, backward)
    assert count(False) == (forward, without_x)


@pytest.mark.parametrize("name", [name for name, (module, *_) in CASES.items() if isinstance(module, nn.Conv2d)])
def test_how_many_windows_hold_an_input(name: str) -> None:
    """Against windows that are counted: in a large picture some input lies in as many as that, and none in more."""
    module = CASES[name][0]
    pool = layers.pool(module)
    assert pool is not None
    if not pool:
        assert windows.Windows((), 1, 1, 1, 1).holding == 1
        return
    picture = torch.zeros(1, 1, 40, 40, requires_grad=True)
    plane = layers.box(nn.Conv2d(1, 1, *pool), picture, torch.Size())
    plane.sum().backward()
    box = windows.Windows(pool, 40, 40, *plane.shape[2:])
    assert box.holding == picture.grad.max()
    assert box.held == module.kernel_size[0] * module.kernel_size[1]


# The input's channels and side, the output's channels, the windows that hold an input, the memory order: one kernel?
LARGE = {
    "ResNet-50, 3×3 at 56": (64, 56, 64, 9, True, True),
    "ResNet-50, 3×3 at 7": (512, 7, 512, 9, True, True),
    "ResNet-50, 1×1 at 7": (512, 7, 2048, 1, True, True),
    "ResNet-50, 1×1 at 56, strided": (256, 56, 512, 1, True, True),
    "ResNet-50, 3×3 at 56, contiguous": (64, 56, 64, 9, False, True),
    "ResNet-50, 3×3 at 28, contiguous": (128, 28, 128, 9, False, False),  # 8 blocks, and 6 programs that add them up
    "ResNet-50, 3×3 at 7, contiguous": (512, 7, 512, 9, False, False),  # 32 blocks, and 43 programs that add them up
    "ResNet-50, 1×1 at 7, contiguous": (512, 7, 2048, 1, False, False),  # 128 blocks at once
    "many outputs, contiguous": (64, 7, 4096, 1, False, False),  # 256 blocks at once
    "WRN-28-10, 3×3 at 32": (160, 32, 160, 9, True, True),
    "WRN-28-10, first block": (16, 32, 160, 9, True, True),
    "5×5": (64, 56, 64, 25, True, False),
}


@pytest.mark.parametrize("name", LARGE)
def test_when_one_kernel_makes_both_gradients(name: str) -> None:
    channels, side, out, holding, last, one = LARGE[name]
    given, shape = (tiles.Shape(64 * side * side, side * side, c, last) for c in (channels, out))
    assert windows.pays(given, shape, holding, 132) is one
    cut = windows.input_tile(given, 132)
    assert cut.positions <= windows.POSITIONS
    assert cut.programs[0] == tiles.cdiv(given.positions, cut.positions)


@triton
def test_when_one_kernel_sums_the_energy_and_adds_the_noise() -> None:
    """Where channels are neighbours in memory, and positions are more than a head's."""
    device = 0 if torch.cuda.is_available() else -1
    for images, side, channels, last, one in (
        (64, 56, 256, True, True), (64, 7, 2048, True, True), (12608, 1, 384, True, True), (200, 32, 160, True, True),
        (64, 1, 1000, True, False), (64, 1, 2, True, False), (64, 56, 256, False, False),
    ):  # fmt: skip
        shape = tiles.Shape(images * side**2, side**2, channels, last)
        found = windows.pointwise(tiles.Shape(shape.positions, shape.per_image, 64, last), shape, 0.0, 0, device)
        assert (found is not None) is one
        if found is not None:
            covered = found.constants["BP"] * found.constants["BLOCKS"] * found.grid[0]
            assert shape.positions <= covered < shape.positions + found.constants["BP"] * found.constants["BLOCKS"]


@triton
def test_channels_that_are_read_one_by_one_are_filtered_apart_where_they_are_many() -> None:
    box = windows.Windows(((3, 3), (1, 1), (1, 1)), 32, 32, 32, 32)
    for images, channels, one in ((64, 40, False), (64, 96, True), (1, 40, True)):
        shape = tiles.Shape(images * 1024, 1024, channels, True)
        device = 0 if torch.cuda.is_available() else -1
        assert (windows.windowed(shape, box, 0, device) is not None) is one
