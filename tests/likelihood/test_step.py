"""A second pass inside a step: norm layers as in the step itself, and no statistics move."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import undrift
from support import convnet, images, learnables, same, snapshot
from undrift import Step
from undrift.likelihood import Consistency, Roid, entropy

KEPT = ("train", "moving", "domain")


class Asking:
    """A likelihood that asks for both other passes, and looks at what they leave behind."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []
        self.mean: list[Tensor] = []
        self.plain: list[Tensor] = []
        self.left_alone: list[bool] = []

    def __call__(self, logits: Tensor, step: Step) -> Tensor:
        key, before = step.model.key, snapshot(step.model.net)
        mode = key.noisy, key.training
        self.logits.append(logits.detach())
        self.mean.append(step.mean_logits().detach())
        step.drawn_logits()
        with torch.no_grad():
            self.plain.append(step.forward(step.images))
        self.left_alone.append(same(step.model.net.state_dict(), before) and (key.noisy, key.training) == mode)
        return entropy(logits, step)


def run(loop: str, model: undrift.Perturbed, x: Tensor, likelihood: Any) -> None:
    if loop == "stream":
        next(undrift.stream(model, [x], likelihood))
    else:
        undrift.adapt(model, x, likelihood, 1, batch_size=len(x), progress=False, generator=torch.Generator())


@pytest.mark.parametrize("loop", ["stream", "adapt"])
@pytest.mark.parametrize("pace", [0.1, 1.0])
@pytest.mark.parametrize("draws", [1, 2])
def test_train_normalises_the_mean_network_by_its_batch(loop: str, pace: float, draws: int) -> None:
    net, x = convnet().eval(), images(8)
    with torch.no_grad():
        expected = copy.deepcopy(net).train()(x)  # PyTorch's own: a step normalises by its batch
    paces = {"norm_momentum": pace, "stream_norm_momentum": pace}
    model = undrift.perturb(net, init_fraction=0.1, train_samples=draws, **paces)
    asking = Asking()
    run(loop, model, x, asking)
    assert len(asking.mean) == draws
    for mean in asking.mean:
        # The order of the images is the loop's.
        torch.testing.assert_close(mean.sort(0).values, expected.sort(0).values)
    for plain in asking.plain:  # as noisy as a draw is, and normalised alike
        assert not torch.allclose(plain.sort(0).values, expected.sort(0).values)
        torch.testing.assert_close(plain.sort(0).values, expected.sort(0).values, rtol=0.5, atol=0.5)
    assert asking.left_alone == [True] * draws
    assert not torch.equal(model.net[1].running_mean, torch.zeros(8))  # type: ignore[index, union-attr]


@pytest.mark.filterwarnings("ignore:COLLAPSED")  # a network without training has few answers
@pytest.mark.parametrize(("loop", "climb"), [("stream", 0.0), ("stream", 0.05), ("adapt", 0.0)])
def test_every_draw_of_a_step_is_normalised_by_its_batch(loop: str, climb: float) -> None:
    quiet = {"layers": (), "norm_momentum": 0.1, "stream_norm_momentum": 0.1, "climb": climb, "stream_optimiser": "sgd"}
    net = convnet()
    once, thrice = (undrift.perturb(copy.deepcopy(net), train_samples=draws, **quiet) for draws in (1, 3))
    asking = Asking()
    run(loop, once, images(8), entropy)
    run(loop, thrice, images(8), asking)
    # Without noise all draws are one, and so are their steps.
    for logits in asking.logits[:3]:
        torch.testing.assert_close(logits, asking.logits[0])
    torch.testing.assert_close(learnables(thrice), learnables(once))
    torch.testing.assert_close(snapshot(thrice.net), snapshot(once.net))


@pytest.mark.filterwarnings("ignore:COLLAPSED")  # a network without training has few answers
@pytest.mark.parametrize("statistics", [*KEPT, "batch", "source"])
@pytest.mark.parametrize("loop", ["stream", "adapt"])
def test_without_noise_the_mean_network_is_the_step_itself(loop: str, statistics: str) -> None:
    model = undrift.perturb(convnet(), norm_statistics=statistics, init_fraction=0.0, stream_norm_momentum=0.1)
    asking = Asking()
    run(loop, model, images(8), asking)
    torch.testing.assert_close(asking.mean, asking.logits, rtol=0, atol=0)
    assert asking.left_alone == [True]


def test_a_fresh_draw_is_normalised_as_the_step_is() -> None:
    model, x = undrift.perturb(convnet(), init_fraction=0.1), images(8)
    step = Step(model, x, model)
    model(x)
    kept, at = snapshot(model.net), model.key.step.clone()
    drawn = step.drawn_logits()
    assert same(model.net.state_dict(), kept)
    model.key.step.copy_(at)
    assert torch.equal(drawn, model(x))  # the same noise in a step of the loop
    assert not same(model.net.state_dict(), kept)


@pytest.mark.parametrize("statistics", ["moving", "domain"])
def test_kept_statistics_rest(statistics: str) -> None:
    model, x = undrift.perturb(convnet(), norm_statistics=statistics, init_fraction=0.1), images(8)
    model(x)
    kept = snapshot(model.net)
    mean = Step(model, x, model).mean_logits()
    assert same(model.net.state_dict(), kept)
    with model.mean():
        assert torch.equal(mean, model(x))


def test_consistency_under_train_by_hand() -> None:
    net, x = convnet(), images(8)
    twin = copy.deepcopy(net).train()
    model = undrift.perturb(net, init_fraction=0.1)
    logits = model(x)
    loss = Consistency()(logits, Step(model, x, model))
    p, q = logits.log_softmax(1), twin(x).log_softmax(1)
    torch.testing.assert_close(loss, -0.5 * (p.exp() * q + q.exp() * p).sum(1).mean())


class Part(nn.Module):
    """A convolution and its norm layer, which may run again in the backward pass."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.conv, self.norm, self.head, self.again = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 3), again

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.part, x, use_reentrant=False) if self.again else self.part(x)
        return self.head(x.mean((2, 3)))

    def part(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).relu()


@pytest.mark.slow
def test_checkpointing_and_a_compiler_see_the_same_step() -> None:
    source, x = Part(again=False).state_dict(), images(8)
    found = []
    for again, compiled in ((False, False), (True, False), (False, True)):
        net = Part(again)
        net.load_state_dict(source)
        model = undrift.perturb(net, init_fraction=0.1, generator=torch.Generator().manual_seed(0))
        if compiled:
            model.compile(backend="eager")
        Consistency()(model(x), Step(model, x, model)).backward()
        kept = {n: b.clone() for n, b in model.net.named_buffers()}
        found.append(({n: p.grad for n, p in learnables(model).items()}, kept))
    for gradients, kept in found[1:]:
        torch.testing.assert_close(gradients, found[0][0])
        torch.testing.assert_close(kept, found[0][1])
    assert all(g is not None and g.abs().sum() > 0 for g in found[0][0].values())


@pytest.mark.parametrize(("statistics", "view"), [("train", False), ("batch", False), ("moving", True)])
def test_the_statistics_of_one_image_are_no_view_of_its_batch(statistics: str, view: bool) -> None:
    model, x = undrift.perturb(convnet(), norm_statistics=statistics), images(4)
    kept = torch.tensor([True, False, False, False])
    assert (Roid()._other(Step(model, x, model), kept) is not None) == view
