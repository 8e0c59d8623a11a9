"""Symmetric views, and the label-free test that tells which of them are safe for a network."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import undrift
from undrift.answer.views import AGREEMENT, VIEWS, SafeViews, chosen, combined, mirror, mirror_tells, shift

LETTERS = {"b": (1, 0, 0, 1, 1, 0, 1, 1, 0), "d": (0, 0, 1, 0, 1, 1, 0, 1, 1), "o": (0, 1, 0, 1, 0, 1, 0, 1, 0)}


def test_views_by_hand() -> None:
    image = torch.arange(6.0).view(1, 1, 2, 3)
    assert mirror(image).flatten().tolist() == [2, 1, 0, 5, 4, 3]
    moved = shift(torch.arange(9.0).view(1, 1, 3, 3), 1, 1)  # what comes in is reflected
    assert moved.flatten().tolist() == [4, 3, 4, 1, 0, 1, 4, 3, 4]
    still = torch.rand(2, 3, 8, 8)
    assert torch.equal(shift(shift(still, 1, 2), -1, -2)[..., 2:-2, 2:-2], still[..., 2:-2, 2:-2])


def test_views_combine_the_image_itself_first() -> None:
    image = torch.rand(2, 3, 16, 16)
    views = [view(image) for view in combined(("mirror", "shift"))]
    nudged = VIEWS["shift"](image)
    for found, expected in zip(views, (image, mirror(image), nudged, VIEWS["shift"](mirror(image))), strict=True):
        assert torch.equal(found, expected)


def test_an_unknown_view_is_named() -> None:
    with pytest.raises(undrift.OptionError, match=r"'turn' is not one of mirror, shift"):
        chosen(("mirror", "turn"))


def passed(net: nn.Module, images: Tensor) -> tuple[str, ...] | None:
    test = SafeViews(tuple(VIEWS))
    with torch.no_grad():
        for part in images.split(40):
            for name, view in VIEWS.items():
                test.look(net(part), name, net(view(part)))
    return test.passed


def letters(count: int) -> tuple[Tensor, Tensor]:
    """Return drawings of b, d and o with noise, and which is which."""
    label = torch.randint(3, (count,))
    patterns = torch.tensor(list(LETTERS.values()), dtype=torch.float32).view(3, 1, 3, 3)
    drawn = F.pad(F.interpolate(patterns, scale_factor=4.0), (4, 4, 4, 4))
    return drawn[label] + 0.3 * torch.randn(count, 1, 20, 20), label


def reader() -> nn.Module:
    """Return a network that tells these letters apart, wherever they stand."""
    net = nn.Sequential(
        nn.Conv2d(1, 16, 9, stride=2), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(),
        nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip
    optimiser = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(60):
        images, label = letters(64)
        down, right = torch.randint(-1, 2, (2,)).tolist()
        loss = F.cross_entropy(net(shift(images, down, right)), label)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return net.eval()


def test_letters_pass_a_shift_and_no_mirror_image() -> None:
    images, label = letters(200)
    net = reader()
    assert (net(images).argmax(1) == label).float().mean() > 0.95
    assert passed(net, images) == ("shift",)


def test_what_looks_alike_in_a_mirror_passes() -> None:
    net = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4))
    assert passed(net, torch.rand(80, 3, 16, 16)) == ("mirror", "shift")


def test_few_images_decide_nothing_and_a_state_goes_on() -> None:
    net = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4))
    test, images = SafeViews(("mirror",)), torch.rand(80, 3, 8, 8)
    test.look(net(images[:40]), "mirror", net(mirror(images[:40])))
    assert test.passed is None
    again = SafeViews(("mirror",))
    again.load(test.state())
    for each in (test, again):
        each.look(net(images[40:]), "mirror", net(mirror(images[40:])))
        assert each.passed == ("mirror",)


def test_the_surest_half_decides_on_both_sides() -> None:
    sure, unsure = torch.tensor([9.0, 0.0]), torch.tensor([0.1, 0.0])
    logits = torch.stack([sure] * 50 + [unsure] * 50)
    test = SafeViews(("mirror",))
    test.look(logits, "mirror", torch.cat([logits[:50], -logits[50:]]))  # only unsure answers turn
    assert test.passed == ("mirror",)
    kept = round(100 * AGREEMENT / 2) - 1  # of the surest half
    test = SafeViews(("mirror",))
    test.look(logits, "mirror", torch.cat([logits[:kept], -logits[kept:]]))
    assert test.passed == ()


def tilted() -> nn.Module:
    """Return a network that sees left and right apart."""
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)).eval()


def test_a_prediction_is_the_mean_over_views() -> None:
    net, images = tilted(), torch.rand(5, 3, 8, 8)
    p = undrift.predict(net, images, views="mirror")
    with torch.no_grad():
        both = torch.stack([net(images).softmax(1), net(mirror(images)).softmax(1)])
        four = torch.stack([net(view(images)).softmax(1) for view in combined(("mirror", "shift"))])
    mean = both.mean(0)
    torch.testing.assert_close(p.probs, mean)
    torch.testing.assert_close(p.mutual_info, (torch.special.entr(mean) - torch.special.entr(both).mean(0)).sum(1))
    model = undrift.perturb(net, answer_views=("mirror", "shift"))
    torch.testing.assert_close(undrift.predict(model, images, samples=0).probs, four.mean(0))


def test_views_are_refused_where_they_make_no_sense() -> None:
    model, images = undrift.perturb(tilted()), torch.rand(5, 3, 8, 8)
    with pytest.raises(undrift.OptionError, match=r"views='mirror' with mode=\"fast\""):
        undrift.predict(model, images, views="mirror", mode="fast")
    with pytest.raises(undrift.OptionError, match=r"answer_views='turn' is not one of mirror, shift, or auto alone"):
        undrift.Options(answer_views="turn")
    assert set(VIEWS) == set(undrift.options.VIEW_NAMES)


@pytest.mark.parametrize("method", ["norm-stats", "tent", "vmp", "roid"])
def test_any_stream_averages_its_answers_over_views(method: str) -> None:
    images = torch.rand(8, 3, 8, 8)
    settings: dict[str, Any] = {"test_samples": 0, "train_samples": 0, "answer": "before"}
    settings |= {"seed": 1} if method == "roid" else {}

    def first(images: Tensor, *views: str) -> Tensor:
        torch.manual_seed(0)
        return next(undrift.stream(tilted(), [images], method=method, answer_views=views, **settings)).probs

    torch.testing.assert_close(first(images, "mirror"), (first(images) + first(mirror(images))) / 2)


def test_a_stream_may_find_its_views_itself() -> None:
    net = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4))
    going = undrift.stream(net, [torch.rand(40, 3, 16, 16) for _ in range(2)], method="tent-ft", answer_views="auto")
    assert [going.online.views.names for _ in going] == [(), ("mirror", "shift")]


def test_an_image_of_one_row_or_column_is_not_moved_across_it() -> None:
    row = torch.arange(4.0).reshape(1, 1, 1, 4)
    assert VIEWS["shift"](row).tolist() == [[[[1.0, 0.0, 1.0, 2.0]]]]
    assert torch.equal(VIEWS["shift"](row[..., :1]), row[..., :1])


def test_mirror_images_tell_unless_they_alone_change_labels() -> None:
    half, few, none = torch.tensor([1.0, 0, 1, 0, 1, 0]), torch.tensor([0.0, 0, 1, 0, 0, 0]), torch.zeros(6)
    assert mirror_tells(half, few)  # three times as many
    assert not mirror_tells(torch.ones(6), few)
    assert not mirror_tells(few, none)
    assert mirror_tells(none, none)
