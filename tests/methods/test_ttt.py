"""TTT: its views, loss and steps by hand, and that all that is not shared stays bit for bit."""

import copy
import io
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import undrift
from prepared_support import SHARED, UNTRAINED, Fixed, Small, crops, rotated, small, trained_head
from support import images, same, snapshot
from undrift import Step, methods
from undrift.likelihood import Rotation


def test_views_are_turned_and_cut_as_said() -> None:
    image = torch.tensor([[1.0, 2.0], [3.0, 4.0]])[None, None]
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    model = undrift.perturb(net, layers=())

    def views(**settings: Any) -> set[tuple[float, ...]]:
        seen: list[Tensor] = []
        hook = net[0].register_forward_hook(lambda _layer, _args, output: seen.append(output))
        asked = Rotation(split="0", head=Fixed(0.0, 0, 0, 0), views=800, seed=0, **settings)
        with asked.watch(model):
            asked(torch.zeros(1, 2), Step(model, image, model))
        hook.remove()
        return {tuple(view.tolist()) for view in seen[-1]}

    turns = {(1, 2, 3, 4), (2, 4, 1, 3), (4, 3, 2, 1), (3, 1, 4, 2)}
    assert views(pad=0, flip=False) == turns
    padded = F.pad(image, (1,) * 4)
    windows = {tuple(padded[0, 0, y : y + 2, x : x + 2].flatten().tolist()) for y in range(3) for x in range(3)}
    windows |= {(b, a, d, c) for a, b, c, d in windows}
    assert views(pad=1) == {tuple(w[i - 1] for i in turn) for w in windows for turn in turns}
    # And by the generator's draws, as the steps below have them.
    generator = torch.Generator().manual_seed(0)
    by_hand = rotated(crops(image.repeat(800, 1, 1, 1), 1, generator), torch.randint(4, (800,), generator=generator))
    assert views(pad=1) == {tuple(view.flatten().tolist()) for view in by_hand}


def test_the_loss_by_hand() -> None:
    model = undrift.perturb(small(), methods.get("ttt").options)
    for logits, of_zero, of_other in (((0.0,) * 4, math.log(4), math.log(4)), ((50.0, 0, 0, 0), 0.0, 50.0)):
        asked = Rotation(head=Fixed(*logits), views=16, seed=0)
        step = Step(model, images(1), lambda x: model(x))
        with asked.watch(model):
            loss = asked(torch.zeros(1, 5), step)
        generator = torch.Generator().manual_seed(0)
        crops(images(1).repeat(16, 1, 1, 1), 4, generator)
        turns = torch.randint(4, (16,), generator=generator)
        upright = int((turns == 0).sum())
        assert 0 < upright < 16
        assert float(loss.detach()) == pytest.approx((upright * of_zero + (16 - upright) * of_other) / 16, rel=1e-5)
    with pytest.raises(undrift.DataError, match="needs square"):
        Rotation()(torch.zeros(1, 5), Step(model, torch.rand(1, 3, 8, 6), lambda x: model(x)))


def test_views_are_padded_with_what_black_is_to_the_network() -> None:
    how = undrift.images.Preprocess(mean=(0.5, 0.4, 0.3), std=(0.2, 0.25, 0.5))
    model = undrift.perturb(small(), methods.get("ttt").options, preprocess=how)
    seen: list[Tensor] = []
    model.net.conv1.register_forward_hook(lambda _m, args, _output: seen.append(args[0]))  # type: ignore[union-attr]
    asked = Rotation(head=Fixed(0.0, 0, 0, 0), views=32)
    white = how.normalise(torch.full((1, 3, 8, 8), 255, dtype=torch.uint8))
    with asked.watch(model):
        asked(torch.zeros(1, 5), Step(model, white, lambda x: model(x)))
    colours = seen[-1].permute(0, 2, 3, 1).reshape(-1, 3).unique(dim=0)
    black = torch.tensor([-0.5 / 0.2, -0.4 / 0.25, -0.3 / 0.5])
    torch.testing.assert_close(colours, torch.stack([black, white[0, :, 0, 0]]))


def test_a_head_answers_in_eval_mode() -> None:
    net = small()
    head = trained_head(net).train()
    next(undrift.stream(net, [images(2)], method="ttt", head=head, views=4))
    assert not any(module.training for module in head.modules())


def by_hand(net: Small, head: nn.Module, image: Tensor, steps: int, generator: torch.Generator) -> Tensor:
    """Make TTT's steps on one image in place, and return the answer to the image as it is."""
    parameters = [p for name in SHARED for p in getattr(net, name).parameters()] + list(head.parameters())
    for _ in range(steps):
        views = crops(image.repeat(8, 1, 1, 1), 4, generator)
        turns = torch.randint(4, (8,), generator=generator)
        loss = F.cross_entropy(head(net.shared(rotated(views, turns))), turns)
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= 0.05 * gradient
    return net(image).softmax(1).detach()


def test_online_ttt_is_one_step_an_image_and_then_the_answer() -> None:
    net, x = small(), images(4)
    head = trained_head(net)
    mine, my_head = copy.deepcopy(net), copy.deepcopy(head)
    generator = torch.Generator().manual_seed(0)
    wanted = torch.cat([by_hand(mine, my_head, image[None], 1, generator) for image in x])
    going = undrift.stream(net, x.split(2), method="ttt", head=head, views=8, stream_lr=0.05, seed=0)
    found = torch.cat([p.probs for p in going])
    torch.testing.assert_close(found, wanted)
    assert not torch.allclose(found, small()(x).softmax(1), atol=1e-4)  # the steps did something
    assert going.report.steps == 4
    for name, value in my_head.state_dict().items():
        torch.testing.assert_close(head.state_dict()[name], value)


def test_standard_ttt_reloads_and_makes_ten_steps_for_each_image() -> None:
    net, x = small(), images(3)
    head = trained_head(net)
    wanted = []
    for image in x:
        mine, my_head = copy.deepcopy(net), copy.deepcopy(head)
        wanted.append(by_hand(mine, my_head, image[None], 10, torch.Generator().manual_seed(0)))
    going = undrift.stream(net, [x], method="ttt:standard", head=head, views=8, stream_lr=0.05, seed=0)
    torch.testing.assert_close(next(going).probs, torch.cat(wanted))
    assert going.report.steps == 30


def test_ttt_leaves_all_that_is_not_shared_bit_for_bit() -> None:
    net = small()
    before = snapshot(net)
    going = undrift.stream(net, [images(4)], method="ttt", head=trained_head(net), views=4, stream_lr=0.1)
    list(going)
    after = snapshot(going.model.net)
    moved = {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}
    assert moved == set(SHARED)
    assert same(before, snapshot(going.remove()))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_an_untrained_head_is_attached_with_a_warning_and_trained_along() -> None:
    net = small()
    torch.manual_seed(0)
    with pytest.warns(undrift.UndriftWarning, match=UNTRAINED):
        going = undrift.stream(net, [images(2), images(2, 1)], method="ttt:standard", views=4, stream_lr=0.1)
    head = going.online.likelihood.head
    start = snapshot(head)
    assert start["rest.fc.weight"].shape == (4, 8)
    next(going)
    assert not torch.equal(snapshot(head)["rest.fc.weight"], start["rest.fc.weight"])
    going.online.reset()
    assert same(start, snapshot(head))


@pytest.mark.parametrize("variant", ["ttt", "ttt:standard"])
def test_the_seed_decides_and_without_one_torchs_does(variant: str) -> None:
    def answers(torchs: int, **more: int) -> Tensor:
        net, head = small(), trained_head(small())
        torch.manual_seed(torchs)  # after them: making them sets one
        going = undrift.stream(net, [images(3)], method=variant, head=head, views=4, stream_lr=0.1, **more)
        return next(going).probs

    assert torch.equal(answers(0, seed=1), answers(2, seed=1))
    assert not torch.equal(answers(0, seed=1), answers(0, seed=2))
    assert torch.equal(answers(0), answers(0))
    assert not torch.equal(answers(0), answers(2))


def test_an_episode_begins_its_views_anew_whatever_gave_the_seed() -> None:
    head, x = trained_head(small()), images(1)
    going = undrift.stream(small(), [x, x], method="ttt:standard", head=head, views=4, stream_lr=0.1)
    first, again = (p.probs for p in going)
    assert torch.equal(first, again)


@pytest.mark.parametrize("variant", ["ttt", "ttt:standard"])
def test_an_interrupted_stream_goes_on_with_its_head_and_its_views(variant: str) -> None:
    def start(batches: list[Tensor], seed: int = 5) -> undrift.Stream:
        net, head = small(), trained_head(small())
        torch.manual_seed(seed)
        return undrift.stream(net, batches, method=variant, head=head, views=4, stream_lr=0.1)

    batches = list(images(6).split(2))
    whole = [p.probs for p in start(batches)]
    first = start(batches[:2])
    assert all(torch.equal(p.probs, wanted) for p, wanted in zip(first, whole, strict=False))
    content = io.BytesIO()
    torch.save(first.state_dict(), content)
    content.seek(0)
    second = start(batches[2:], seed=6)
    second.load_state_dict(torch.load(content, weights_only=True))
    assert torch.equal(next(second).probs, whole[2])
