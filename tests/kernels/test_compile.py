"""torch.compile: whole graphs, fresh noise each step, and no compiled network that silently loses its noise.

The backend runs the captured graph with PyTorch's own operators, through the same autograd partitioning as the default
backend; no compiler is needed on the machine.
"""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import undrift
from support import convnet, images

BACKEND = "aot_eager_decomp_partition"


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def compiled(module: nn.Module, fullgraph: bool = True) -> Callable[..., Tensor]:
    return torch.compile(module, fullgraph=fullgraph, backend=BACKEND)


def gradients(
    model: undrift.Perturbed, call: Callable[..., Tensor], steps: int = 2
) -> tuple[list[Tensor], list[Tensor]]:
    model.reseed(7)
    outputs = [call(images(seed=s)) for s in range(steps)]
    sum(y.square().sum() for y in outputs).backward()
    grads = [p.grad for p in model.parameters() if p.requires_grad]
    model.zero_grad()
    return [y.detach() for y in outputs], grads


@pytest.mark.parametrize("statistics", ["source", pytest.param("batch", marks=pytest.mark.slow), "moving"])
@pytest.mark.parametrize("estimator", ["local", "drawn"])
def test_a_full_graph_draws_what_eager_draws(estimator: str, statistics: str) -> None:
    model = undrift.perturb(convnet(), estimator=estimator, norm_statistics=statistics)
    twin = copy.deepcopy(model)
    eager_outputs, eager_grads = gradients(twin, twin)
    outputs, grads = gradients(model, compiled(model))
    for a, b in zip(eager_outputs + eager_grads, outputs + grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert not torch.equal(outputs[0], outputs[1])


@pytest.mark.slow
def test_compiling_the_network_itself() -> None:
    model = undrift.perturb(convnet(), norm_statistics="source")
    call = compiled(model.net)
    assert not torch.equal(call(images()), call(images()))
    model.reseed(1)
    first = call(images())
    model.reseed(1)
    torch.testing.assert_close(first, model(images()))


@pytest.mark.slow
def test_off_and_remove_are_seen_by_a_compiled_network() -> None:
    net = convnet().eval()
    expected = net(images())
    model = undrift.perturb(net)
    call = compiled(model)
    assert not torch.allclose(call(images()), expected, atol=1e-4)
    with model.off():
        torch.testing.assert_close(call(images()), expected)
    assert not torch.allclose(call(images()), expected, atol=1e-4)
    inner = compiled(net)
    assert not torch.allclose(inner(images()), expected, atol=1e-4)
    model.remove()
    torch.testing.assert_close(inner(images()), expected)


def test_a_network_compiled_before_perturb_gets_its_noise() -> None:
    net = convnet().eval()
    call = compiled(net)
    expected = call(images())
    model = undrift.perturb(net)
    assert not torch.allclose(call(images()), expected, atol=1e-4)
    model.remove()
    torch.testing.assert_close(call(images()), expected)


@pytest.mark.slow
def test_a_compiled_network_can_be_perturbed() -> None:
    net = convnet().eval()
    call = torch.compile(net, fullgraph=True, backend=BACKEND)
    expected = call(images())
    model = undrift.perturb(call)
    assert list(model.noise) == ["0", "3", "8"]
    assert not torch.allclose(model(images()), expected, atol=1e-4)
    model.remove()
    torch.testing.assert_close(call(images()), expected)


def test_perturb_makes_the_compiler_look_at_hooks() -> None:
    """Told at once, whoever imported the compiler: a twin of the network's class may be compiled first."""
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=True):
        undrift.perturb(nn.Linear(2, 2))
        assert torch._dynamo.config.skip_nnmodule_hook_guards is False


class Twin(nn.Module):
    """A class of one's own: Dynamo keeps its code for all instances together."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@pytest.mark.slow
@pytest.mark.parametrize("twin_first", [True, False])
def test_a_twin_of_its_class_takes_no_noise_away(twin_first: bool) -> None:
    x = torch.ones(2, 4)
    twin, net = Twin(), Twin()
    clean = net(x).detach()
    if twin_first:
        compiled(twin)(x)
    model = undrift.perturb(net)
    noisy, other = compiled(net), compiled(twin)
    for _ in range(3):
        torch.testing.assert_close(other(x), twin(x))
        assert not torch.allclose(noisy(x), clean, atol=1e-4)
        assert not torch.allclose(compiled(model)(x), clean, atol=1e-4)


class Blocks(nn.Module):
    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        self.a, self.b, self.checkpointed = nn.Linear(4, 4), nn.Linear(4, 4), checkpointed

    def block(self, x: Tensor) -> Tensor:
        return torch.tanh(self.b(torch.tanh(self.a(x))))

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)
        return self.block(x)


class Middle(nn.Module):
    """Three layers, of which the middle one may run again; each has keys of its own."""

    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Linear(4, 2)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.a(x))
        x = checkpoint(self.part, x, use_reentrant=False) if self.checkpointed else self.part(x)
        return self.c(x.mean((2, 3)))

    def part(self, x: Tensor) -> Tensor:
        return torch.relu(self.b(x))


def test_a_mean_network_is_exported_without_operators_of_ours() -> None:
    model = undrift.perturb(Middle(checkpointed=False), init_fraction=0.1)
    x = torch.rand(2, 3, 8, 8)
    with model.mean():
        program = torch.export.export(model, (x,))
        want = model(x)
    assert "undrift" not in str(program.graph)
    torch.testing.assert_close(program.module()(x), want)


def test_a_compiler_that_computes_more_again_is_refused() -> None:
    model = undrift.perturb(Middle(checkpointed=False))
    told = torch._functorch.config.patch(activation_memory_budget=0.5)
    with told, pytest.raises(Exception, match="would draw other noise"):  # the compiler wraps our error
        compiled(model)(torch.rand(2, 3, 8, 8))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Blocks, Middle])
def test_checkpointing_inside_a_full_graph(kind: type[Blocks] | type[Middle]) -> None:
    """The backward pass must not compute a step's keys from a counter that has moved on."""

    def run(checkpointed: bool, compile_it: bool) -> list[Tensor]:
        torch.manual_seed(0)
        net, generator = kind(checkpointed=checkpointed), torch.Generator().manual_seed(2)
        model = undrift.perturb(net, linear_sharing="kernel", generator=generator, init_fraction=0.1)
        # This one, as Inductor, moves the counter inside the graph.
        call = torch.compile(model, fullgraph=True, backend="aot_eager") if compile_it else model
        x = torch.ones(3, 4) if kind is Blocks else torch.linspace(0, 1, 2 * 3 * 8 * 8).view(2, 3, 8, 8)
        call(x).square().sum().backward()
        return [n.log_var.grad for n in model.noise.values()]

    want = run(False, False)
    for checkpointed in (False, True):
        for got, expected in zip(run(checkpointed, True), want, strict=True):
            torch.testing.assert_close(got, expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo, at a graph break
def test_checkpointing_around_compiled_blocks_draws_the_same_noise_again() -> None:
    class Outer(nn.Module):
        def __init__(self, compile_it: bool) -> None:
            super().__init__()
            self.inner = Blocks(checkpointed=False)
            self.call = [torch.compile(self.inner, backend=BACKEND) if compile_it else self.inner]

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.call[0], x, use_reentrant=False)

    def run(compile_it: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = undrift.perturb(Outer(compile_it), generator=torch.Generator().manual_seed(2))
        model(torch.ones(3, 4)).square().sum().backward()
        return [n.log_var.grad for n in model.noise.values()]

    for a, b in zip(run(False), run(True), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["attention", "standardised"])
def test_modules_that_run_again_compile(kind: str) -> None:
    class Standardised(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.weight - self.weight.mean(1, keepdim=True), self.bias)

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x)[0]

    net = Attending() if kind == "attention" else nn.Sequential(Standardised(4, 4))
    x = torch.randn(2, 3, 4)
    clean = net(x).detach()
    model = undrift.perturb(net, init_fraction=0.1)
    call = compiled(model)
    y = call(x)
    assert not torch.allclose(y, clean, atol=1e-4)
    y.square().sum().backward()
    assert all(n.log_var.grad.abs().sum() > 0 for n in model.noise.values())
    model.reseed(1)
    y = call(x)
    model.reseed(1)
    torch.testing.assert_close(model(x), y)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo, at a graph break
@pytest.mark.parametrize("estimator", ["local", "drawn"])
def test_a_part_outside_the_graph_gets_fresh_noise_too(estimator: str) -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        @torch.compiler.disable
        def outside(self, x: Tensor) -> Tensor:
            return self.b(x)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.a(x), self.outside(x)

    model = undrift.perturb(Broken(), estimator=estimator)
    call = compiled(model, fullgraph=False)
    first, second = call(torch.ones(2, 4)), call(torch.ones(2, 4))
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])


class Often(nn.Module):
    """A layer used ten times: more often than a compiled graph has keys ready for, which is eight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(10):
            x = torch.tanh(self.layer(x))
        return x


def test_a_compiled_graph_draws_each_use_of_a_layer_anew() -> None:
    """As uncompiled passes do, beyond the keys that are ready too."""
    torch.manual_seed(0)
    model, x = undrift.perturb(Often(), linear_sharing="kernel", init_fraction=0.3), torch.rand(3, 4)
    found = []
    for call in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.reseed(1)
        found.append(call(x))
    torch.testing.assert_close(found[0], found[1])
