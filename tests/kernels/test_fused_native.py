"""Layers whose noise is C++: the same numbers as in Python, the same errors, and nothing kept."""

import ctypes
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import undrift
from fused_support import numpys, triton, use
from posterior import test_row
from undrift.kernels.triton import calls, native
from undrift.kernels.triton.native.packed import packed
from undrift.posterior.perturbed import Perturbed

from .test_fused_known import images, on_kernels, perturbed, step


def nodes(out: Tensor) -> list[str]:
    """Return the names of all nodes behind a tensor."""
    found, todo = {}, [out.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in found:
            found[node] = node.name()
            todo += [each for each, _ in node.next_functions]
    return [*found.values()]


def settled(monkeypatch: pytest.MonkeyPatch, how: str = "native") -> Perturbed:
    """Return a network whose layers were all met before."""
    use(how, monkeypatch)
    model = perturbed(on_kernels(monkeypatch))
    for _ in range(3):
        step(model)
    return model


@triton
@numpys
def test_it_is_python_s_noise_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and all gradients, with and without gradients, of a smaller batch, too."""
    found = []
    for how in ("native", "python"):
        model = settled(monkeypatch, how)
        behind = nodes(model(images(model.key.step.device)))
        assert behind.count("NoisyBackward") == (4 if how == "native" else 0)
        rows = [*step(model), *step(model, 1), *step(model, 1)]
        with torch.no_grad():
            rows += [model(images(model.key.step.device)) for _ in range(2)]
        found.append(rows)
    for mine, theirs in zip(*found, strict=True):
        assert (mine is None and theirs is None) or mine.equal(theirs)


class Deep(nn.Module):
    """Images less their mean, large windows, groups, rows of a matrix and one of them, no bias, strides."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.Conv2d(8, 8, 1, bias=False)
        self.norm, self.grouped = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.large, self.wide = nn.Conv2d(8, 8, 4, 2, 2), nn.Conv2d(8, 8, 5, padding=2)
        self.rows, self.head = nn.Linear(8, 16, bias=False), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.body(torch.relu(self.stem(x)))).relu()
        x = self.wide(self.large(self.grouped(x))).flatten(2).transpose(1, 2).contiguous()
        out: Tensor = self.head(self.rows(x).relu()[:, 0])
        return out


@triton
@numpys
@pytest.mark.parametrize(
    ("energy", "trained"),
    [("square", "body"), ("square", "rows"), ("offset", ""), ("centred", ""), ("centred", "rows")],
)
def test_layers_of_every_kind(energy: str, trained: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for how in ("native", "python"):
        use(how, monkeypatch)
        device = on_kernels(monkeypatch)
        torch.manual_seed(0)
        rest = {"linear_sharing": "kernel", "init_fraction": 0.3, "norm_statistics": "batch"}
        if energy != "centred":  # that of images alone is quick
            rest |= {"energy": energy}
        model = undrift.perturb(Deep().to(device), first_energy=energy, energy_offset=0.1, **rest)
        model.reseed(1)
        if trained:
            model.net.get_submodule(trained).weight.requires_grad_()
        for _ in range(2):
            step(model)
        assert nodes(model(images(device))).count("NoisyBackward") == (7 if how == "native" else 0)
        rows = [*step(model), *step(model)]
        found.append(rows)
        assert all(each is None or each.isfinite().all() for each in rows)
        assert sum(each is not None for each in rows) == 2 * (
            1 + len([p for p in model.parameters() if p.requires_grad])
        )
    for mine, theirs in zip(*found, strict=True):
        assert (mine is None and theirs is None) or mine.equal(theirs)


@triton
@numpys
@pytest.mark.parametrize("how", ["native", "python"])
def test_the_graph_as_autograd_has_it(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second pass over a graph that was kept, an error over one that was not, gradients of some tensors, twice."""
    model = settled(monkeypatch, how)
    x, wanted = images(model.key.step.device).requires_grad_(), [noise.log_var for noise in model.noises()]
    for _ in range(2):  # an input that wants a gradient is met anew
        model(x)
    out = model(x).square().sum()
    first = torch.autograd.grad(out, [x, *wanted], retain_graph=True)
    again = torch.autograd.grad(out, [x, *wanted], retain_graph=True)
    assert all(a.equal(b) for a, b in zip(first, again, strict=True))
    (alone,) = torch.autograd.grad(out, x, retain_graph=True)
    torch.testing.assert_close(alone, first[0])
    (one,) = torch.autograd.grad(out, wanted[-1], retain_graph=True)
    torch.testing.assert_close(one, first[-1])
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        slope.sum().backward()
    out = model(x).square().sum()
    out.backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.backward()


@triton
@numpys
def test_what_changes_between_a_pass_and_its_gradient_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = settled(monkeypatch)
    out = model(images(model.key.step.device))
    with torch.no_grad():
        model.noises()[2].log_var.add_(1)
    with pytest.raises(RuntimeError, match="inplace operation"):
        out.sum().backward()


@triton
@numpys
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # PyTorch's own
@pytest.mark.parametrize("how", ["native", "python"])
def test_forward_differentiation_is_refused(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not answered without a tangent."""
    model = settled(monkeypatch, how)
    x = images(model.key.step.device)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        model(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))


@triton
@numpys
def test_a_hook_on_the_output_itself_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    model, heard = settled(monkeypatch), []
    model.net.head.register_forward_hook(
        lambda _layer, _args, output: output.register_hook(heard.append) and None, prepend=True
    )
    for _ in range(2):
        step(model)
    assert len(heard) == 2


@triton
@numpys
def test_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pass and outputs go with the graph: after its gradient, or with what was never differentiated."""
    use("native", monkeypatch)
    model = test_row.perturbed(test_row.on_kernels(monkeypatch))
    for differentiated in (True, False):
        out = test_row.loss(model)
        alive, behind = model.key.last, weakref.ref(out)
        assert alive is not None
        assert alive() is not None
        if differentiated:
            (out + undrift.kl(model)).backward()
            assert alive() is None
        del out
        assert (alive(), behind()) == (None, None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="Triton's interpreter runs in one thread")
def test_backward_passes_of_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two graphs at once leave their gradients in rows of their own."""
    use("native", monkeypatch)
    model = test_row.perturbed(test_row.on_kernels(monkeypatch))
    outs, wanted = [test_row.loss(model) for _ in range(2)], [noise.log_var for noise in model.noises()]
    together: dict[int, Any] = {}

    def run(place: int) -> None:
        together[place] = torch.autograd.grad(outs[place], wanted, retain_graph=True)

    threads = [threading.Thread(target=run, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for place, out in enumerate(outs):
        for mine, want in zip(together[place], torch.autograd.grad(out, wanted), strict=True):
            assert mine.equal(want)


# Kernels ----------------------------------------------------------------------------------------------------------

PTX = """
.visible .entry some_kernel(
	.param .u64 .ptr .global .align 1 some_kernel_param_0,
	.param .u64 .ptr .global .align 1 some_kernel_param_1,
	.param .f32 some_kernel_param_2,
	.param .u32 some_kernel_param_3,
	.param .u64 some_kernel_param_4,
	.param .u64 .ptr .global .align 1 some_kernel_param_5
)
.reqntid 128
{ ld.param.b64 %rd1, [some_kernel_param_0]; }
"""
NUMBERS = (0.5, 7, 1, 2**40)


def compiled(ptx: str = PTX, **changes: Any) -> Any:
    """Return what Triton would: four warps, and 96 bytes that its threads share."""
    about = {"num_warps": 4, "num_ctas": 1, "shared": 96, "launch_pdl": False, "global_scratch_size": 0} | changes
    return SimpleNamespace(metadata=SimpleNamespace(**about), asm={"ptx": ptx}, function=1234)


def test_a_kernel_taken_apart() -> None:
    """Of its arguments, what is 1 was left out; behind them is one pointer to memory that it does not want."""
    half = 0x3F000000
    assert packed(compiled(), (3, 2), 2, NUMBERS, 0) == ((1234, 3, 2, 128, 96, 0), (half, 7, 2**40, 0))
    assert packed(compiled(PTX.replace(".f32", ".b32")), (3, 2), 2, NUMBERS, 0) is not None


@pytest.mark.parametrize(
    "other",
    [
        compiled(num_ctas=2), compiled(launch_pdl=True), compiled(global_scratch_size=16),
        compiled(PTX.replace(".param .u32", ".param .u64")), compiled(PTX.replace("_5\n", "_5,\n.param .f32 x\n")),
        compiled(PTX.replace("\t.param .f32 some_kernel_param_2,\n", "")),
    ],
)  # fmt: skip
def test_a_kernel_that_wants_something_else_is_left_to_triton(other: Any) -> None:
    assert packed(other, (3, 2), 2, NUMBERS, 0) is None


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give what a driver was asked for: its own arguments, and a kernel's."""
    if torch.cuda.is_available():
        pytest.skip("the driver here is a real one")
    use("native", monkeypatch)
    asked: list[tuple[Any, ...]] = []
    whole, at = ctypes.c_uint, ctypes.c_void_p

    def launch(function: int, *rest: Any) -> int:
        *sizes, stream, arguments, _extra = rest
        kinds = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_float, ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64)
        places = ctypes.cast(arguments, ctypes.POINTER(at))
        values = [ctypes.cast(places[i], ctypes.POINTER(kind)).contents.value for i, kind in enumerate(kinds)]
        asked.append((function, tuple(sizes), stream, values))
        return refuse[0]

    def stream_of(_device: int, found: Any) -> int:
        found[0] = 99
        return 0

    refuse = [0]
    driver = ctypes.CFUNCTYPE(ctypes.c_int, at, *[whole] * 7, at, at, at)(launch)
    streams = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.POINTER(at))(stream_of)
    native.module.bind(native._address(driver), native._address(streams))
    yield SimpleNamespace(asked=asked, refuse=refuse)
    native.module.bind(0, 0)


def test_a_launch(launched: Any) -> None:
    found = packed(compiled(), (3, 2), 2, NUMBERS, -1)
    assert found is not None
    kernel = native.module.kernel(*found)
    x, y = torch.zeros(8), torch.zeros(8)
    assert native.module.launch(kernel, x, y)
    values = [x.data_ptr(), y.data_ptr(), 0.5, 7, 2**40, 0]
    assert launched.asked == [(1234, (3, 2, 1, 128, 1, 1, 96), 99, values)]
    assert not native.module.launch(kernel, x[1:], y)  # not a multiple of 16 bytes: Triton compiles another kernel
    assert len(launched.asked) == 1
    launched.refuse[0] = 201
    assert not native.module.launch(kernel, x, y)
    with pytest.raises(TypeError, match="a tensor is needed"):
        native.module.launch(kernel, 3)
    with pytest.raises(ValueError, match="PyCapsule"):
        native.module.launch("kernel", x)


def test_a_call_is_launched_natively_once_it_was_seen_to_work(launched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's own launch first; where the driver writes something else, or refuses, it stays at that."""
    monkeypatch.setattr(calls, "direct_launches", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    triton_s: list[Any] = []
    kernel = {(3, 2): lambda *args, num_warps: triton_s.append(args) or compiled()}
    x, y = torch.zeros(8), torch.zeros(8)
    for alike, refuse, natives in ((True, 0, 3), (False, 0, 1), (True, 1, 1)):
        monkeypatch.setattr(calls, "_alike", lambda _a, _b, alike=alike: alike)
        launched.refuse[0] = refuse
        call = calls.Call(kernel, (3, 2), NUMBERS, {}, -1, (1,))
        assert not call.tried
        for _ in range(3):
            call(x, y)
        assert call.tried
        assert (len(launched.asked), len(triton_s)) == (natives, 4 - natives if natives == 3 else 3)
        assert (call.native is not None) is (natives == 3)
        launched.asked.clear()
        triton_s.clear()
