"""Symmetric views, and the label-free test that tells which of them are safe for a network."""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import undrift
from support import varied
from undrift.answer.views import SafeViews
from undrift.likelihood import Teacher

LETTERS = {"b": (1, 0, 0, 1, 1, 0, 1, 1, 0), "d": (0, 0, 1, 0, 1, 1, 0, 1, 1), "o": (0, 1, 0, 1, 0, 1, 0, 1, 0)}


class Looking(nn.Module):
    """Remembers what it was shown."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.seen = nn.Linear(1, 2), []  # type: ignore[var-annotated]

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return self.last(x.mean((1, 2, 3))[:, None])


def views_of(images: Tensor, *names: str) -> list[Tensor]:
    """Return the images as a prediction over these views shows them to the network."""
    net = Looking()
    undrift.predict(net, images, views=names)
    return net.seen


def mirror(images: Tensor) -> Tensor:
    return images.flip(-1)


def nudged(images: Tensor, by: int = 1) -> Tensor:
    """Return the images moved down and to the right; what comes in is the border reflected."""
    return F.pad(images, (by, 0, by, 0), mode="reflect")[..., : images.shape[-2], : images.shape[-1]]


def test_views_by_hand() -> None:
    image = torch.arange(6.0).view(1, 1, 2, 3)
    assert views_of(image, "mirror")[1].flatten().tolist() == [2, 1, 0, 5, 4, 3]
    moved = views_of(torch.arange(9.0).view(1, 1, 3, 3), "shift")[1]  # what comes in is reflected
    assert moved.flatten().tolist() == [4, 3, 4, 1, 0, 1, 4, 3, 4]
    still = torch.rand(2, 3, 32, 32)
    assert torch.equal(views_of(still, "shift")[1], nudged(still, 2))  # a sixteenth


def test_views_combine_the_image_itself_first() -> None:
    image = torch.rand(2, 3, 16, 16)
    wanted = (image, mirror(image), nudged(image), nudged(mirror(image)))
    for found, expected in zip(views_of(image, "mirror", "shift"), wanted, strict=True):
        assert torch.equal(found, expected)


def test_an_unknown_view_is_named() -> None:
    with pytest.raises(undrift.OptionError, match=r"'turn' is not one of mirror, shift"):
        views_of(torch.rand(2, 3, 8, 8), "mirror", "turn")


def passed(net: nn.Module, images: Tensor) -> tuple[str, ...] | None:
    """Return the views that an adaptation which changes nothing finds safe."""
    model = undrift.perturb(net, layers=(), train="*", adapt_lr=0.0, answer_views="auto")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", undrift.UndriftWarning)  # nobody says that it is a good network
        found = undrift.adapt(model, images, undrift.entropy, epochs=1, batch_size=40).views
    model.remove()
    return found


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
        loss = F.cross_entropy(net(images.roll(tuple(torch.randint(-1, 2, (2,)).tolist()), (2, 3))), label)
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
    net, images = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4)), torch.rand(80, 3, 16, 16)
    assert passed(varied(net, images), images) == ("mirror", "shift")


def test_answers_of_one_class_prove_nothing() -> None:
    def test(*classes: int) -> SafeViews:
        logits = 9 * torch.eye(10)[torch.tensor(classes).repeat(64)]
        found = SafeViews(("mirror",))
        found.look(logits, "mirror", logits)
        return found

    assert test(0).passed is None  # a run of zeros, which are zeros in a mirror, too
    assert test(0, 1, 2, 3).passed == ("mirror",)
    assert test(*[0] * 10).passed == ()  # more may not come


@pytest.mark.parametrize(
    ("mirrored", "shifted", "safe"),
    [(12, 0, False), (12, 3, False), (12, 5, True), (7, 0, True), (16, 10, False)],  # of 50; the last below 70 %
)
def test_a_mirror_image_that_a_shift_contradicts_is_unsafe(mirrored: int, shifted: int, safe: bool) -> None:
    label, sure = torch.arange(100) % 10, torch.where(torch.arange(100) < 50, 10.0, 1.0)[:, None]

    def answers(changed: int) -> Tensor:
        return sure * F.one_hot(torch.where(torch.arange(100) < changed, (label + 1) % 10, label), 10)

    test = SafeViews(("mirror", "shift"))
    test.look(answers(0), "mirror", answers(mirrored))
    test.look(answers(0), "shift", answers(shifted))
    assert test.passed is not None
    assert ("mirror" in test.passed) == safe


class Left(nn.Module):
    """Answers with the left column: what a mirror image is answered with stands in the right one."""

    def __init__(self, classes: int = 2) -> None:
        super().__init__()
        self.scale, self.classes = nn.Linear(1, 1, bias=False), classes

    def forward(self, x: Tensor) -> Tensor:
        return x[:, : self.classes, 4, 0] + 0 * self.scale.weight.sum()


def answered(logits: Tensor, of_mirror: Tensor) -> Tensor:
    """Return images for `Left`."""
    x = torch.zeros(*logits.shape, 8, 8)
    x[..., 0], x[..., -1] = logits[..., None], of_mirror[..., None]
    return x


def test_the_surest_half_decides_on_both_sides() -> None:
    sure, unsure = torch.tensor([9.0, 0.0]), torch.tensor([0.1, 0.0])
    logits = torch.stack([sure, sure.flip(0)] * 25 + [unsure, unsure.flip(0)] * 25)
    turned = torch.cat([logits[:50], -logits[50:]])  # only unsure answers turn
    assert "mirror" in (passed(Left(), answered(logits, turned)) or ())
    kept = 50 * 5 // 6  # of the surest half; of two classes a little more than that is needed
    turned = torch.cat([logits[:kept], -logits[kept:]])
    assert "mirror" not in (passed(Left(), answered(logits, turned)) or ())


@pytest.mark.parametrize(("classes", "safe"), [(2, False), (3, False), (10, True)])
def test_of_few_classes_more_must_agree_as_more_do_by_chance(classes: int, safe: bool) -> None:
    logits = torch.cat([9 * torch.eye(classes)[torch.arange(50) % classes], torch.zeros(50, classes)])
    turned = torch.cat([logits[:37], logits[37:50].roll(1, 1), logits[50:]])  # 74 % of the surest half agree
    found = passed(Left(classes), answered(logits, turned))
    assert ("mirror" in (found or ())) == safe


def test_a_test_of_few_classes_goes_on_from_its_state() -> None:
    logits = torch.cat([9 * torch.eye(2)[torch.arange(50) % 2], torch.zeros(50, 2)])
    test, again = SafeViews(("mirror",)), SafeViews(("mirror",))
    test.look(logits, "mirror", torch.cat([logits[:37], -logits[37:]]))
    again.load(test.state())
    assert again.passed == test.passed == ()


def tilted() -> nn.Module:
    """Return a network that sees left and right apart."""
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)).eval()


def test_a_prediction_is_the_mean_over_views() -> None:
    net, images = tilted(), torch.rand(5, 3, 8, 8)
    p = undrift.predict(net, images, views="mirror")
    with torch.no_grad():
        both = torch.stack([net(images).softmax(1), net(mirror(images)).softmax(1)])
        four = torch.stack([net(view).softmax(1) for view in views_of(images, "mirror", "shift")])
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
    batches = [torch.rand(40, 3, 16, 16) for _ in range(2)]
    varied(net, torch.cat(batches))

    def stream(given: list[Tensor]) -> undrift.Stream:
        return undrift.stream(copy.deepcopy(net), given, method="tent-ft", answer_views="auto")

    going = stream(batches)
    next(going)
    state = going.state_dict()
    assert going.online.views.names == ()  # 40 images are too few
    next(going)
    assert going.online.views.names == ("mirror", "shift")
    other = stream(batches[1:])
    other.load_state_dict(state)
    next(other)
    assert other.online.views.names == ("mirror", "shift")


def test_an_image_of_one_row_or_column_is_not_moved_across_it() -> None:
    row = torch.arange(4.0).reshape(1, 1, 1, 4)
    assert views_of(row, "shift")[1].tolist() == [[[[1.0, 0.0, 1.0, 2.0]]]]
    assert torch.equal(views_of(row[..., :1], "shift")[1], row[..., :1])


class Spots(nn.Module):
    """Answers with the sign of one pixel, another one in a mirror image, and a third one where the image is moved."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm2d(1), nn.Linear(1, 2, bias=False)
        with torch.no_grad():
            self.last.weight.copy_(torch.tensor([[1.0], [-1.0]]))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(x)[:, :, 8, 4])


@pytest.mark.parametrize(
    ("mirrored", "shifted", "believed"),
    [(6, 2, 6), (12, 2, 2), (2, 0, 0), (0, 0, 0)],  # three times as many labels are believed, not six, nor all
)
def test_mirror_images_tell_unless_they_alone_change_labels(mirrored: int, shifted: int, believed: int) -> None:
    sign = torch.tensor([1.0, -1.0]).repeat(6)
    x = torch.zeros(12, 1, 16, 16)
    x[:, 0, 8, 4] = sign
    x[:, 0, 8, 11] = sign * (1 - 2 * (torch.arange(12) < mirrored).float())
    x[:, 0, 7, 3] = sign * (1 - 2 * (torch.arange(12) < shifted).float())
    disagree = Teacher(prior_images=16).doubt(undrift.perturb(Spots().eval(), layers=()), x).views
    assert disagree * 12 == pytest.approx(believed)


def test_images_whose_views_agree_cost_no_pass_more() -> None:
    net, passes = Spots().eval(), list[int]()
    net.last.register_forward_hook(lambda *_: passes.append(1))
    x = torch.rand(12, 1, 16, 16)
    x[:, 0, 8, 4] = x[:, 0, 8, 11] = x[:, 0, 7, 3] = torch.tensor([1.0, -1.0]).repeat(6)
    model = undrift.perturb(net, layers=())
    whole = Teacher(prior_images=16).doubt(model, x)
    saved = Teacher(prior_images=16).doubt(model, x, least=0.15)
    assert whole.views == saved.views == 0
    assert whole.counted == saved.counted > 0
    # The image and two views each time; at first, those of the sign that statistics make answers worse, too.
    assert len(passes) == 3 + (1 + 1 + 2) + 3
