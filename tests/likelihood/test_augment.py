"""Views of a batch: each operation by hand, one draw a call, and randomness that is its own."""

import colorsys
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import undrift
from support import images
from undrift.images import IMAGENET
from undrift.likelihood import Augment

COTTA = {"blur": True, "noise": 0.005, "outside": "border"}
ROID = {"blur": False, "noise": 0.0, "outside": "reflection"}
NOTHING = {
    **dict.fromkeys(("brightness", "contrast", "saturation", "gamma", "scale"), 1.0),
    **dict.fromkeys(("hue", "angle", "blur"), 0.0),
    "order": (0, 1, 2, 3, 4),
    "shift": (0, 0),
    "flip": False,
}


def seen(images: Tensor, view: dict[str, Any], outside: str = "border") -> Tensor:
    """Return a view of images whose parameters are chosen."""

    class Chosen(Augment):
        def draw(self, height: int, width: int) -> Any:
            return replace(super().draw(height, width), **(NOTHING | view))

    return Chosen(noise=0.0, outside=outside)(images)  # type: ignore[arg-type]


def picture(height: int = 6, width: int = 6, channels: int = 3) -> Tensor:
    return torch.rand(2, channels, height, width, generator=torch.Generator().manual_seed(3))


def grey(x: Tensor) -> Tensor:
    return 0.299 * x[:, :1] + 0.587 * x[:, 1:2] + 0.114 * x[:, 2:]


def test_a_view_of_defaults_is_the_image() -> None:
    assert torch.equal(seen(picture(), {}), picture())


@pytest.mark.parametrize(
    ("view", "by_hand"),
    [
        ({"brightness": 1.4}, lambda x: 1.4 * x),
        ({"contrast": 1.3}, lambda x: 1.3 * x - 0.3 * grey(x).mean((1, 2, 3), keepdim=True)),
        ({"saturation": 0.5}, lambda x: 0.5 * x + 0.5 * grey(x)),
        ({"gamma": 0.7}, lambda x: x**0.7),
        ({"flip": True}, lambda x: x[..., [5, 4, 3, 2, 1, 0]]),
        ({"brightness": 1.4, "gamma": 0.7}, lambda x: (1.4 * x).clamp(0, 1) ** 0.7),
        ({"brightness": 1.4, "gamma": 0.7, "order": (4, 0, 1, 2, 3)}, lambda x: 1.4 * x**0.7),
    ],
)
def test_operations_by_hand(view: dict[str, Any], by_hand: object) -> None:
    torch.testing.assert_close(seen(picture(), view), by_hand(picture()).clamp(0, 1))  # type: ignore[operator]


def test_hue_by_another_library() -> None:
    x = torch.cat(
        [picture(), torch.full((1, 3, 6, 6), 0.4), torch.eye(3)[None, :, :, None].expand(1, 3, 3, 2).repeat(1, 1, 2, 3)]
    )
    got = seen(x, {"hue": -0.06})
    for i, row, column in [(0, 0, 0), (0, 3, 2), (1, 5, 5), (1, 1, 4), (2, 0, 0), (3, 0, 0), (3, 1, 1), (3, 2, 0)]:
        h, s, v = colorsys.rgb_to_hsv(*x[i, :, row, column].tolist())
        wanted = colorsys.hsv_to_rgb((h - 0.06) % 1, s, v)
        torch.testing.assert_close(got[i, :, row, column], torch.tensor(wanted), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("outside", "mode"), [("border", "replicate"), ("reflection", "reflect")])
@pytest.mark.parametrize("size", [(16, 16), (17, 17), (16, 22)])
def test_sampling_outside_is_padding_first_and_cropping_after(outside: str, mode: str, size: tuple[int, int]) -> None:
    x, (top, left) = picture(*size), (size[0] // 2, size[1] // 2)
    padded = F.pad(x, (left, left, top, top), mode=mode)
    shifted = seen(x, {"shift": (2, -1)}, outside)
    torch.testing.assert_close(shifted, padded[..., top + 1 : top + 1 + size[0], left - 2 : left - 2 + size[1]])
    view = {"angle": 12.0, "scale": 0.93, "shift": (1, -1), "blur": 0.5}
    whole = seen(padded, view)[..., top : top + size[0], left : left + size[1]]
    torch.testing.assert_close(seen(x, view, outside), whole, atol=1e-5, rtol=0)


def test_turning_and_scaling_about_the_centre() -> None:
    x = picture()
    quarter = seen(x, {"angle": 90.0})
    torch.testing.assert_close(quarter, x.rot90(-1, (2, 3)), atol=1e-5, rtol=0)
    spot = torch.zeros(1, 1, 9, 9)
    spot[..., 4, 6] = 1
    assert seen(spot, {"scale": 2.0})[0, 0, 4, 8] == pytest.approx(1, abs=1e-5)  # twice as far out


def test_blur_by_convolution() -> None:
    x = picture()
    taps = torch.tensor([-2.0, -1, 0, 1, 2])
    kernel = torch.exp(-(taps**2) / (2 * 0.5**2))
    kernel = torch.outer(kernel, kernel) / kernel.sum() ** 2
    padded = F.pad(x, (2, 2, 2, 2), mode="replicate")
    wanted = F.conv2d(padded, kernel.expand(3, 1, 5, 5), groups=3)
    torch.testing.assert_close(seen(x, {"blur": 0.5}), wanted, atol=1e-5, rtol=0)


def test_one_draw_serves_the_batch_and_only_noise_differs() -> None:
    twice = picture()[:1].repeat(2, 1, 1, 1)
    one, other = Augment(**ROID, seed=0)(twice)  # type: ignore[arg-type]
    torch.testing.assert_close(one, other, atol=1e-6, rtol=0)  # vector units round by place
    one, other = Augment(**COTTA, seed=0)(twice)  # type: ignore[arg-type]
    inside = (one > 0) & (one < 1) & (other > 0) & (other < 1)
    assert not torch.equal(one, other)
    assert (one - other)[inside].abs().max() < 0.005 * 8
    quiet = torch.full((64, 3, 8, 8), 0.5)
    noisy = Augment(**COTTA, seed=1)  # type: ignore[arg-type]
    views = [noisy(quiet) for _ in range(3)]
    for view in views:
        assert (view - view.mean()).std() == pytest.approx(0.005, rel=0.05)
    assert not torch.equal(views[0] - views[0].mean(), views[1] - views[1].mean())


@pytest.mark.parametrize("how", [COTTA, ROID])
@pytest.mark.parametrize("shape", [(2, 1, 7, 5), (2, 3, 8, 8), (3, 4, 6, 6), (1, 3, 1, 1), (0, 3, 8, 8)])
def test_any_size_and_number_of_channels(how: dict[str, object], shape: tuple[int, ...]) -> None:
    augment = Augment(**how, seed=0)  # type: ignore[arg-type]
    for _ in range(5):
        view = augment(torch.rand(shape))
        assert view.shape == shape
        assert ((view >= 0) & (view <= 1)).all()


def test_parameters_stay_in_their_ranges_and_fill_them() -> None:
    augment = Augment(seed=0)
    views = [augment.draw(32, 64) for _ in range(400)]
    ranges = {
        "brightness": (0.6, 1.4),
        "contrast": (0.7, 1.3),
        "saturation": (0.5, 1.5),
        "hue": (-0.06, 0.06),
        "gamma": (0.7, 1.3),
        "angle": (-15, 15),
        "scale": (0.9, 1.1),
        "blur": (0.001, 0.5),
    }
    for name, (low, high) in ranges.items():
        found = [getattr(view, name) for view in views]
        assert low <= min(found) < low + 0.05 * (high - low)
        assert high - 0.05 * (high - low) < max(found) <= high
    # A sixteenth of the padded frame, which is twice the image.
    assert {view.shift[0] for view in views} == set(range(-8, 9))
    assert {view.shift[1] for view in views} == set(range(-4, 5))
    assert len({view.order for view in views}) > 90  # of 120
    assert 150 < sum(view.flip for view in views) < 250
    assert all(Augment(**ROID).draw(8, 8).blur == 0 for _ in range(3))  # type: ignore[arg-type]


def test_randomness_is_its_own_and_can_be_resumed() -> None:
    before = torch.get_rng_state()
    first, twin = Augment(seed=5), Augment(seed=5)
    x = images()
    assert torch.equal(first(x), twin(x))
    state = first.state_dict()
    wanted = first(x)
    assert not torch.equal(wanted, twin(x) * 0)
    later = Augment(seed=9)
    later.load_state_dict(state)
    assert torch.equal(later(x), wanted)
    assert torch.equal(torch.get_rng_state(), before)
    views = []
    for _ in range(2):
        torch.manual_seed(1)
        views.append(Augment()(x))
    assert torch.equal(*views)
    assert not torch.equal(views[0], Augment()(x))


def test_normalised_images_are_augmented_as_they_were() -> None:
    raw = images()
    how = IMAGENET.without_resize()
    wanted = how.normalise(Augment(seed=0)(raw))
    torch.testing.assert_close(Augment(seed=0, preprocess=IMAGENET)(how.normalise(raw)), wanted, atol=1e-5, rtol=0)
    torch.testing.assert_close(Augment(seed=0)(how.normalise(raw), IMAGENET), wanted, atol=1e-5, rtol=0)
    with pytest.raises(undrift.DataError, match=r"values from -.*\[0, 1\].*preprocess="):
        Augment(seed=0)(how.normalise(raw))
    with pytest.raises(undrift.DataError, match="N×C×H×W"):
        Augment(seed=0)(torch.rand(4, 12))


def test_autocast_and_half_precision_leave_colours_alone() -> None:
    raw = images()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(Augment(seed=0)(raw), Augment(seed=0)(raw.clone()))
        inside = Augment(seed=0)(raw)
    assert torch.equal(inside, Augment(seed=0)(raw))
    assert Augment(seed=0)(raw.bfloat16()).dtype == torch.bfloat16
