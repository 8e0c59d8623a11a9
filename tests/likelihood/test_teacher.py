"""The averaged teacher by hand: its loss, its average, its answer, its views, and a stream that goes on."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import undrift
from online_support import corrected_prior
from support import varied
from undrift import methods
from undrift.likelihood import Teacher

RATE = 0.1


class Mirrored(nn.Module):
    """A linear network on 1×2×4 images: what it says of a mirror image is not what it says of the image.

    Its norm layer changes nothing that it says.
    """

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 3)
        self.norm = nn.BatchNorm1d(8, affine=False) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        self.norm(x.flatten(1))
        out: Tensor = self.fc(x.flatten(1))
        return out


def batches(count: int = 3, images: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(images, 1, 2, 4, generator=generator) for _ in range(count)]


def quiet(net: nn.Module, **changes: Any) -> undrift.Perturbed:
    """Return the network with its weights trained and no noise."""
    settings = {"train": "*", "layers": (), "kl_weight": 0.0, "answer": "before", "stream_optimiser": "sgd"}
    return undrift.perturb(net, stream_lr=RATE, momentum=0.0, **(settings | changes))


@pytest.mark.parametrize("by_the_batch", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_stream_is_steps_by_hand(share: float, by_the_batch: bool) -> None:
    net = Mirrored(by_the_batch).double()
    w = [p.detach().clone().requires_grad_() for p in net.parameters()]
    average = [p.detach().clone() for p in w]
    model = quiet(net)
    likelihood = Teacher(memory=30, views="mirror", share=share)
    found = list(undrift.stream(model, [x.double() for x in batches()], likelihood))
    for x, p in zip(batches(), found, strict=True):
        x, turned = x.double().flatten(1), x.double().flip(-1).flatten(1)

        def says(weights: list[Tensor], x: Tensor) -> Tensor:
            return nn.functional.linear(x, *weights)

        t = 0.5 * (says(average, x).softmax(1) + says(average, turned).softmax(1))
        own = 0.5 * (says(w, x).softmax(1) + says(w, turned).softmax(1)).detach()
        answer = (1 - share) * t + share * own
        prior = corrected_prior(answer.log()) if by_the_batch else 1.0
        torch.testing.assert_close(p.probs, answer * prior / (answer * prior).sum(1, keepdim=True))
        loss = -0.5 * ((t * says(w, x).log_softmax(1)).sum(1) + (t * says(w, turned).log_softmax(1)).sum(1)).mean()
        for value, grad in zip(w, torch.autograd.grad(loss, w), strict=True):
            value.data -= RATE * grad
        average = [a + 6 / 30 * (v.detach() - a) for a, v in zip(average, w, strict=True)]
    for name, value in zip(("net.fc.weight", "net.fc.bias"), average, strict=True):
        torch.testing.assert_close(likelihood.teacher.weights[name], value)
    for learned, value in zip(model.net.parameters(), w, strict=True):
        torch.testing.assert_close(learned.detach(), value.detach())


def test_without_another_view_a_step_looks_at_the_draw_alone() -> None:
    net = Mirrored()
    before = [p.detach().clone() for p in net.parameters()]
    model = quiet(net)
    x = batches(1)[0]
    next(undrift.stream(model, [x], Teacher(views=(), other=False)))
    w = [p.clone().requires_grad_() for p in before]
    z = nn.functional.linear(x.flatten(1), *w)
    loss = -(z.detach().softmax(1) * z.log_softmax(1)).sum(1).mean()  # the teacher is still the network itself
    for value, grad, learned in zip(before, torch.autograd.grad(loss, w), model.net.parameters(), strict=True):
        torch.testing.assert_close(learned.detach(), value - RATE * grad)


def test_the_average_forgets_by_images_not_by_batches() -> None:
    memory = Teacher(memory=4, views=())
    model = quiet(Mirrored())
    list(undrift.stream(model, batches(1, images=8), memory))  # more images than it remembers: it is the network
    torch.testing.assert_close(memory.teacher.weights["net.fc.weight"], dict(model.named_parameters())["net.fc.weight"])


def test_views_are_tested_once_enough_images_came() -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    likelihood, given = Teacher(), [torch.rand(24, 1, 8, 8) for _ in range(3)]
    going = undrift.stream(quiet(varied(net, torch.cat(given))), given, likelihood)
    seen = [likelihood.views for _ in going]
    assert seen[:2] == [None, None]
    assert seen[2] is not None


def test_a_stopped_stream_goes_on_exactly() -> None:
    def stream(given: list[Tensor]) -> undrift.Stream:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3))
        return undrift.stream(net, given, method="undrift", seed=3, generator=torch.Generator().manual_seed(2))

    given = batches(6, images=16)
    whole = list(stream(given))
    first = stream(given[:3])
    answers = list(first)
    state = first.state_dict()
    rest = stream(given[3:])
    rest.load_state_dict(state)
    answers += list(rest)
    for found, expected in zip(answers, whole, strict=True):
        assert torch.equal(found.probs, expected.probs)


def test_certainty_adds_roids_ratio_of_images_that_are_sure_and_rare() -> None:
    x, net = batches(1)[0], Mirrored()
    given, target = net(x).detach(), net(x).softmax(1).detach()
    moved = {}
    for certainty in (0.0, 0.3):
        model = quiet(copy.deepcopy(net))
        next(undrift.stream(model, [x], Teacher(views=(), other=False, certainty=certainty)))
        moved[certainty] = dict(model.named_parameters())["net.fc.bias"].detach()

    def scaled(values: Tensor) -> Tensor:
        return (values - values.min()) / (values.max() - values.min())

    rare = scaled(1 - nn.functional.cosine_similarity(target, target.mean(0)[None]))
    sure = scaled((target * target.log()).sum(1))
    weights = (3 * rare * sure).exp() * (rare >= rare.mean())
    bias = torch.zeros(3, requires_grad=True)
    p = (given + bias).softmax(1)
    p = p.clamp(max=0.99)
    (-(weights * (p * (p / (1 - p) + 1e-5).log()).sum(1))).mean().backward()
    assert bias.grad is not None
    assert torch.allclose(moved[0.3] - moved[0.0], -RATE * 0.3 * bias.grad, atol=1e-6)
    assert bias.grad.abs().max() > 1e-3


@pytest.mark.parametrize("name", ["undrift", "undrift-light"])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.Identity()], ids=["batch", "group", "none"])
def test_any_network_and_batch_size(name: str, norm: nn.Module) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU(), nn.Dropout(), nn.Flatten(), nn.Linear(8 * 36, 2))
    before = {key: value.clone() for key, value in net.state_dict().items()}
    going = undrift.stream(net, [torch.rand(n, 3, 8, 8) for n in (40, 40, 3)], method=name)
    for p in going:
        assert torch.isfinite(p.probs).all()
        torch.testing.assert_close(p.probs.sum(1), torch.ones(len(p)))
    # With batch norm, batches of 40 make a step together, if they make one.
    assert going.report.steps == 3 or (isinstance(norm, nn.BatchNorm2d) and going.report.steps < 2)
    assert going.remove() is net
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())


def test_small_batches_take_small_steps_and_weights_step_by_their_size() -> None:
    def moved(images: int, scale: float) -> float:
        torch.manual_seed(0)
        net = Mirrored()
        net.fc.weight.data *= scale
        before = net.fc.weight.detach().clone()
        x = torch.rand(images, 1, 2, 4)
        model = quiet(net, stream_optimiser="adam", weights_lr=0.01, stream_lr_images=20)
        next(undrift.stream(model, [x], undrift.entropy))
        return float((model.net.fc.weight.detach() - before).abs().max())

    assert moved(5, 1.0) == pytest.approx(moved(20, 1.0) / 4, rel=1e-3)
    assert moved(40, 1.0) == pytest.approx(moved(20, 1.0), rel=1e-3)
    assert moved(20, 4.0) == pytest.approx(4 * moved(20, 1.0), rel=1e-3)


def test_bad_settings_are_refused() -> None:
    found = "memory=0 is not a whole number from 1 up. Leave it out"
    with pytest.raises(undrift.OptionError, match=found):
        methods.get("undrift").build({"memory": 0})
    with pytest.raises(undrift.OptionError, match=r"'upside down' is not one of mirror, shift"):
        Teacher(views="upside down")


def test_a_step_looks_again_at_images_that_were_sure() -> None:
    net = Mirrored().double()
    with torch.no_grad():
        net.fc.weight.mul_(12)  # sure of some images, unsure of others
    w = [p.detach().clone().requires_grad_() for p in net.parameters()]
    first, second = (x.bfloat16().double() for x in batches(2, images=24))  # images are kept so
    model = quiet(net)
    likelihood = Teacher(memory=10**9, views=(), other=False, replay=100)
    list(undrift.stream(model, [first, second], likelihood))

    def says(x: Tensor) -> Tensor:
        return nn.functional.linear(x.flatten(1), *w)

    with torch.no_grad():  # so large a memory is the source's
        target = [says(x).softmax(1) for x in (first, second)]
    sure = torch.special.entr(target[0]).sum(1) < 0.1 * torch.tensor(3.0).log()
    assert 0 < int(sure.sum()) < 24
    for x, t, again in ((first, target[0], False), (second, target[1], True)):
        loss = -(t * says(x).log_softmax(1)).sum(1).mean()
        if again:
            loss = loss + nn.functional.cross_entropy(says(first[sure]), target[0][sure].argmax(1))
        for value, grad in zip(w, torch.autograd.grad(loss, w), strict=True):
            value.data -= RATE * grad
    for learned, value in zip(model.net.parameters(), w, strict=True):
        torch.testing.assert_close(learned.detach(), value.detach(), rtol=1e-6, atol=1e-6)


def test_what_is_looked_at_again_is_kept_in_a_stopped_stream() -> None:
    def stream(given: list[Tensor]) -> undrift.Stream:
        torch.manual_seed(0)
        net = Mirrored()
        with torch.no_grad():
            net.fc.weight.mul_(12)
        how = {"method": "undrift", "views": (), "replay": 10, "seed": 3}
        return undrift.stream(net, given, **how, generator=torch.Generator().manual_seed(2))

    given = batches(4, images=16)
    whole = list(stream(given))
    first, rest = stream(given[:2]), stream(given[2:])
    list(first)
    state = first.state_dict()
    assert 0 < len(state["likelihood"]["sure"]["labels"]) <= 10
    rest.load_state_dict(state)
    assert all(torch.equal(a.probs, b.probs) for a, b in zip(rest, whole[2:], strict=True))
