"""Networks that write into their input: every draw sees the same image, and the caller keeps his."""

import copy

import pytest
import torch
from torch import Tensor, nn

import undrift
from support import convnet, images


class Writing(nn.Module):
    """A network that normalises its input, in place or not."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.in_place = convnet(), in_place

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x.sub_(0.5).mul_(3) if self.in_place else (x - 0.5) * 3)
        return out


def model_of(in_place: bool) -> undrift.Perturbed:
    return undrift.perturb(Writing(in_place), init_fraction=0.3, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("fold_limit", [0, None])
def test_draws_of_a_network_that_writes_are_those_of_one_that_does_not(fold_limit: int | None) -> None:
    x = images()
    writing, other = (undrift.predict(model_of(way), x, 4, fold_limit=fold_limit) for way in (True, False))
    assert torch.equal(writing.probs, other.probs)
    assert torch.equal(x, images())


def test_a_stream_leaves_the_callers_batches() -> None:
    batches = [images(seed=seed) for seed in range(3)]
    found = [[p.probs for p in undrift.stream(model_of(way), batches, guard=True)] for way in (True, False)]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert all(torch.equal(batch, images(seed=seed)) for seed, batch in enumerate(batches))


def test_only_the_first_pass_of_another_network_gets_a_copy() -> None:
    model, seen = model_of(False), []
    model.net.register_forward_pre_hook(lambda _, args: seen.append(args[0].data_ptr()))
    x = images()
    for _ in range(3):
        model(x)
    assert [place == x.data_ptr() for place in seen] == [False, True, True]
    copied = copy.deepcopy(model)
    copied(x)
    assert seen[-1] == x.data_ptr()


def test_a_network_that_writes_in_some_passes_is_found_out_and_told() -> None:
    model = model_of(False)
    model(images())
    model.net.in_place = True  # type: ignore[assignment]
    with pytest.warns(undrift.UndriftWarning, match="wrote into its input"):
        model(images())
    x = images()
    model(x)
    assert torch.equal(x, images())


def test_gradients_go_on_to_the_callers_input() -> None:
    grads = []
    for way in (True, False):
        x = images().requires_grad_()
        model = model_of(way)
        for _ in range(2):
            model(x * 1).sum().backward()
            model(x).sum().backward()
        assert x.grad is not None
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_inference_tensors() -> None:
    with torch.inference_mode():
        x = images()
        writing, other = (undrift.predict(model_of(way), x, 4, fold_limit=0) for way in (True, False))
        assert torch.equal(writing.probs, other.probs)
        assert torch.equal(x, images())


class Writer(nn.Module):
    """Writes its answer into a tensor that it is given beside the images."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, out: Tensor) -> Tensor:
        out.copy_(self.layer(x).detach())
        return self.layer(x)


def test_what_is_given_beside_the_images_may_be_written_to() -> None:
    model = undrift.perturb(Writer())
    for _ in range(3):
        out = torch.zeros(2, 3)
        model(torch.rand(2, 4), out)
        assert out.abs().sum() > 0


def test_a_network_that_writes_compiles_to_one_graph() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.sub_(0.5))

    model = undrift.perturb(InPlace())
    x = torch.rand(2, 4)
    same = x.clone()
    model(x)
    torch.compile(model, backend="eager", fullgraph=True)(x)
    assert torch.equal(x, same)
