"""Keys of noise: known answers, which weights and uses get which, and what replays them."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import undrift
from support import convnet, images

TOLD = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 8)  # of hooks on what autograd saves


def test_keys_of_weights_uses_and_steps_differ() -> None:
    key = undrift.perturb(nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))), generator=1).key
    seen = []
    with torch.no_grad():
        for _ in range(3):
            key.begin(nn.Identity(), (), {})
            seen += [int(key.next_key(n)) for n in (0, 1, 2, 3, 1, 1)]
            seen += [int(key.weight_key(n)) for n in range(4)]
            assert key.weight_key(2).equal(key.weight_key(2))
    assert len(set(seen)) == len(seen) == 30


@pytest.mark.skipif(not TOLD, reason="this PyTorch does not tell of hooks")
def test_one_ticket_a_layer_where_it_may_run_again() -> None:
    """What a layer asks, it asks once: each question costs a draw from the global generator."""
    model = undrift.perturb(convnet(), norm_statistics="batch")
    before = torch.get_rng_state()
    model(images()).sum().backward()
    assert torch.equal(torch.get_rng_state(), before)
    checkpoint(model, images(), use_reentrant=False)
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    for _ in range(1 + len(model.noise)):  # the root's, and one a layer
        assert not torch.equal(torch.get_rng_state(), after)
        torch.empty((), dtype=torch.int64).random_()
    assert torch.equal(torch.get_rng_state(), after)


def test_a_generator_makes_noise_reproducible_and_steps_differ() -> None:
    def outputs(seed: int) -> list[Tensor]:
        torch.manual_seed(0)
        model = undrift.perturb(convnet(), generator=torch.Generator().manual_seed(seed), norm_statistics="source")
        return [model(images()) for _ in range(2)]

    first, again, other = outputs(1), outputs(1), outputs(2)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], other[0])


@pytest.mark.parametrize("estimator", ["local", "drawn"])
def test_reseed_starts_anew(estimator: str) -> None:
    model = undrift.perturb(convnet(), norm_statistics="source", estimator=estimator)
    model.reseed(5)
    first = model(images())
    assert not torch.equal(model(images()), first)
    model.reseed(5)
    assert torch.equal(model(images()), first)


class Checkpointed(nn.Module):
    """Blocks that run again in the backward pass; the middle layer is used twice, once in each block."""

    def __init__(self, active: bool, *, reentrant: bool = False, preserve: bool = True) -> None:
        super().__init__()
        self.stem, self.norm, self.middle = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Conv2d(6, 6, 3, padding=1)
        self.head = nn.Linear(6, 4)
        self.active, self.reentrant, self.preserve = active, reentrant, preserve

    def block(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.middle(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(2):
            if self.active:
                x = checkpoint(self.block, x, use_reentrant=self.reentrant, preserve_rng_state=self.preserve)
            else:
                x = self.block(x)
        return self.head(x.mean((2, 3)))


def gradients(active: bool, forwards: int = 1, reentrant: bool = False, **options: object) -> list[Tensor]:
    torch.manual_seed(0)
    model = undrift.perturb(
        Checkpointed(active, reentrant=reentrant), generator=torch.Generator().manual_seed(1), **options
    )
    x = images().requires_grad_()
    sum(model(x).square().sum() for _ in range(forwards)).backward()
    return [p.grad for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("forwards", [1, 2])
@pytest.mark.parametrize("statistics", ["source", "batch", "moving"])
@pytest.mark.parametrize("estimator", ["local", "drawn"])
def test_activation_checkpointing_draws_the_same_noise_again(
    estimator: str, statistics: str, forwards: int, reentrant: bool
) -> None:
    options = {"estimator": estimator, "norm_statistics": statistics}
    for a, b in zip(
        gradients(False, forwards, **options), gradients(True, forwards, reentrant, **options), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_checkpoint_around_the_whole_network() -> None:
    def loss(outer: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = undrift.perturb(convnet(), generator=torch.Generator().manual_seed(1))
        y = checkpoint(model, images(), use_reentrant=False) if outer else model(images())
        y.square().sum().backward()
        return [p.grad for p in model.parameters() if p.requires_grad]

    for a, b in zip(loss(False), loss(True), strict=True):
        torch.testing.assert_close(a, b)


def test_a_checkpoint_that_cannot_be_replayed_is_an_error() -> None:
    model = undrift.perturb(Checkpointed(True, preserve=False))
    with pytest.raises(undrift.UndriftError, match="preserve_rng_state=True"):
        model(images()).sum().backward()


@pytest.mark.skipif(not TOLD, reason="this PyTorch does not tell of hooks: all parts draw tickets")
def test_a_reentrant_part_that_turns_gradients_on_is_an_error() -> None:
    """It looks as if nothing could run again; a number drawn by another layer must not pass for its own."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def first(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.layers[0](x))
            with torch.enable_grad():
                return torch.tanh(self.layers[1](x))

        def second(self, x: Tensor) -> Tensor:
            return torch.tanh(self.layers[3](torch.tanh(self.layers[2](x))))

        def forward(self, x: Tensor) -> Tensor:
            for part in (self.first, self.second):
                x = checkpoint(part, x, use_reentrant=True)
            return x

    model = undrift.perturb(Net())
    loss = model(torch.randn(3, 4).requires_grad_()).square().sum()
    with pytest.raises(undrift.UndriftError, match="its first run's noise is not known"):
        loss.backward()


def test_prediction_leaves_the_global_generator_alone() -> None:
    model = undrift.perturb(convnet())
    before = torch.get_rng_state()
    with torch.no_grad():
        model(images())
    assert torch.equal(torch.get_rng_state(), before)


def test_passes_from_one_state_of_the_generator_are_told_apart() -> None:
    def run(active: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = undrift.perturb(Checkpointed(active), generator=torch.Generator().manual_seed(1))
        loss = torch.zeros(())
        for factor in (1, 2):
            torch.manual_seed(5)
            loss = loss + factor * model(images()).square().sum()
        loss.backward()
        return [p.grad for p in model.parameters() if p.requires_grad]

    for a, b in zip(run(False), run(True), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("estimator", ["local", "drawn"])
def test_a_part_called_by_itself_is_replayed_too(estimator: str) -> None:
    def run(active: bool) -> list[Tensor]:
        torch.manual_seed(0)
        net = Checkpointed(active)
        model = undrift.perturb(net, generator=torch.Generator().manual_seed(1), estimator=estimator)
        with torch.no_grad():
            model(images())
        net.forward(images()).square().sum().backward()  # not through the hooks of the root
        return [p.grad for p in model.parameters() if p.requires_grad]

    for a, b in zip(run(False), run(True), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_perturbation_that_was_removed_is_freed_at_once() -> None:
    model = undrift.perturb(nn.Sequential(nn.Linear(3, 4)))
    held = weakref.ref(model.key)
    gc.disable()
    try:
        model.remove()
        del model
        assert held() is None
    finally:
        gc.enable()
