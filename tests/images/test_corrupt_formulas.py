"""Each corruption against its formula, written down a second time in plain numpy, loops and Pillow."""

import colorsys
import io
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from undrift.images.corrupt import CORRUPTIONS, DEVELOPMENT, blur, corrupt, draws, filters, streak, weather
from undrift.images.corrupt.constants import SETS, ConstantSet

Array = np.ndarray[Any, Any]


def pictures(side: int, count: int = 2) -> Array:
    """N×H×W×3 uint8: blobs, grain, and black, white and grey pixels."""
    generator = torch.Generator().manual_seed(1)
    blobs = torch.rand(count, 3, 7, 7, generator=generator)
    grain = torch.rand(count, 3, side, side, generator=generator)
    x = F.interpolate(blobs, size=(side, side), mode="bicubic") * 0.8 + grain * 0.2
    x[:, :, 3:5, 3:9], x[:, :, 6:8, 3:9], x[:, :, 9:11, 3:9] = 0, 1, 0.5
    levels: Array = (x.clamp(0, 1) * 255).byte().permute(0, 2, 3, 1).contiguous().numpy()
    return levels


def contrast(x: Array, c: tuple[float, ...]) -> Array:
    mean = x.mean(axis=(0, 1))
    return np.asarray((x - mean) * c[0] + mean)


def brightness(x: Array, c: tuple[float, ...]) -> Array:
    def lift(red: float, green: float, blue: float) -> tuple[float, float, float]:
        hue, saturation, value = colorsys.rgb_to_hsv(red, green, blue)
        return colorsys.hsv_to_rgb(hue, saturation, min(value + c[0], 1))

    return np.array([[lift(*pixel) for pixel in row] for row in x.tolist()])


def saturate(x: Array, c: tuple[float, ...]) -> Array:
    def tint(red: float, green: float, blue: float) -> tuple[float, float, float]:
        hue, saturation, value = colorsys.rgb_to_hsv(red, green, blue)
        return colorsys.hsv_to_rgb(hue, min(max(saturation * c[0] + c[1], 0), 1), value)

    return np.array([[tint(*pixel) for pixel in row] for row in x.tolist()])


def zoomed(x: Array, factor: float) -> Array:
    """The central ceil(size / factor) pixels stretched end to end over round(that · factor) places, cut to size."""
    side = len(x)
    kept = math.ceil(side / factor)
    start, places = (side - kept) // 2, np.linspace(0, kept - 1, round(kept * factor))
    cut = (len(places) - side) // 2
    x = x[start : start + kept, start : start + kept]
    for axis in (0, 1):
        x = np.apply_along_axis(lambda line: np.interp(places, np.arange(kept), line), axis, x)
    return x[cut : cut + side, cut : cut + side]


def zoom_blur(x: Array, c: tuple[float, ...]) -> Array:
    zooms = [zoomed(x, factor) for factor in np.arange(1, c[0], c[1])]
    return (x + sum(zooms)) / (len(zooms) + 1)


def defocus_blur(x: Array, c: tuple[float, ...]) -> Array:
    radius, sigma = c
    reach, taps = (8, 1) if radius <= 8 else (int(radius), 2)
    disk = {
        (i, j): 1.0 for i in range(-reach, reach + 1) for j in range(-reach, reach + 1) if i * i + j * j <= radius**2
    }
    bell = [math.exp(-(t**2) / (2 * sigma**2)) for t in range(-taps, taps + 1)]
    bell = [weight / sum(bell) for weight in bell]

    def inside(k: int) -> int:  # mirrored about the last place, as OpenCV does by default
        return 2 * reach - k if k > reach else -2 * reach - k if k < -reach else k

    padded = np.pad(x, ((reach, reach), (reach, reach), (0, 0)), mode="reflect")
    height, width = x.shape[:2]
    total = np.zeros_like(x)
    for i in range(-reach, reach + 1):
        for j in range(-reach, reach + 1):
            weight = sum(
                bell[a + taps] * bell[b + taps] * disk.get((inside(i + a), inside(j + b)), 0) / len(disk)
                for a in range(-taps, taps + 1)
                for b in range(-taps, taps + 1)
            )
            total += weight * padded[reach + i : reach + i + height, reach + j : reach + j + width]
    return total


def pixelate(x: Array, c: tuple[float, ...]) -> Array:
    image = pytest.importorskip("PIL.Image")
    height, width = x.shape[:2]
    small = image.fromarray(np.round(x * 255).astype(np.uint8)).resize(
        (int(width * c[0]), int(height * c[0])), image.Resampling.BOX
    )
    return np.asarray(small.resize((width, height), image.Resampling.BOX)) / 255


def jpeg_compression(x: Array, c: tuple[float, ...]) -> Array:
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image.fromarray(np.round(x * 255).astype(np.uint8)).save(file, "JPEG", quality=c[0])
    return np.asarray(image.open(file)) / 255


def gaussian_blur(x: Array, c: tuple[float, ...]) -> Array:
    radius = int(4 * c[0] + 0.5)
    bell = np.exp(-0.5 * (np.arange(-radius, radius + 1) / c[0]) ** 2)
    bell /= bell.sum()
    for axis in (0, 1):
        pad = [(radius, radius) if a == axis else (0, 0) for a in range(3)]
        x = np.apply_along_axis(lambda line: np.convolve(line, bell, "valid"), axis, np.pad(x, pad, mode="edge"))
    return x


@pytest.mark.parametrize("severity", range(1, 6))
@pytest.mark.parametrize(
    "formula", [contrast, brightness, saturate, zoom_blur, defocus_blur, pixelate, jpeg_compression, gaussian_blur]
)
@pytest.mark.parametrize("side", [32, 96])
def test_within_one_grey_level_of_the_formula(
    formula: Callable[[Array, tuple[float, ...]], Array], severity: int, side: int
) -> None:
    name = formula.__name__
    levels = pictures(side, count=1)
    c = SETS["cifar" if side == 32 else "imagenet"][name][severity - 1]
    expected = np.clip(formula(levels[0] / 255, c), 0, 1)
    stored = corrupt(torch.from_numpy(levels).permute(0, 3, 1, 2), name, severity)[0].permute(1, 2, 0).numpy()
    assert np.abs(stored.astype(int) - np.floor(expected * 255 + 1e-3)).max() <= 1
    unit = corrupt(torch.from_numpy(levels / 255).permute(0, 3, 1, 2), name, severity)[0].permute(1, 2, 0).numpy()
    assert np.abs(unit - expected).max() * 255 < 0.1


@pytest.mark.parametrize("side", [32, 224])
def test_pixelate_and_jpeg_are_pillow_bit_for_bit(side: int) -> None:
    levels = pictures(side, count=2)
    for formula in (pixelate, jpeg_compression):
        for severity in range(1, 6):
            c = SETS["cifar" if side == 32 else "imagenet"][formula.__name__][severity - 1]
            out = corrupt(torch.from_numpy(levels).permute(0, 3, 1, 2), formula.__name__, severity)
            expected = np.stack([np.round(formula(x / 255, c) * 255) for x in levels])
            assert np.array_equal(out.permute(0, 2, 3, 1).numpy(), expected)


@pytest.mark.parametrize("reach", [1, 2, 4])
def test_glass_moves_are_those_of_the_visit_pixel_by_pixel(reach: int) -> None:
    height, width = 21, 24
    generator = torch.Generator().manual_seed(reach)
    dy, dx = torch.randint(-reach, reach, (2, 3, height, width), generator=generator)
    expected = torch.arange(height * width).repeat(3, 1).view(3, height, width)
    for n in range(3):
        for row in range(height - reach, reach, -1):
            for column in range(width - reach, reach, -1):
                y, x = row + int(dy[n, row, column]), column + int(dx[n, row, column])
                expected[n, row, column] = expected[n, y, x].item()
    assert torch.equal(blur._pixel_sources(dy, dx, reach), expected.flatten(1))


def test_a_streak_is_the_weighted_mean_of_shifts() -> None:
    x = torch.rand(3, 2, 18, 20, generator=torch.Generator().manual_seed(0))
    angles, radius, sigma = np.array([-130.0, -12.0, 40.0]), 4, 2.5
    out = streak.streak(x, radius, sigma, angles)
    weights = [math.exp(-(i**2) / (2 * sigma**2)) for i in range(2 * radius + 1)]
    for n, angle in enumerate(np.deg2rad(angles)):
        for y, column in ((0, 0), (9, 11), (17, 19)):
            total = torch.zeros(2)
            for i, weight in enumerate(weights):
                row = min(max(y + math.ceil(i * math.sin(angle) - 0.5), 0), 17)
                place = min(max(column + math.ceil(i * math.cos(angle) - 0.5), 0), 19)
                total += weight / sum(weights) * x[n, :, row, place]
            torch.testing.assert_close(out[n, :, y, column], total)


def test_plasma_fills_the_unit_range_and_roughens_with_less_decay() -> None:
    chance = torch.rand(6, 64, 64, generator=torch.Generator().manual_seed(0))
    roughness = []
    for decay in (3.0, 2.0, 1.4):
        cloud = weather.plasma(chance, decay)
        assert torch.equal(cloud.amin((1, 2)), torch.zeros(6))
        assert torch.equal(cloud.amax((1, 2)), torch.ones(6))
        roughness.append(float(cloud.diff(dim=2).square().mean()))
    assert roughness == sorted(roughness)


def test_noise_has_its_published_moments() -> None:
    grey = torch.full((20, 3, 64, 64), 0.4)
    small = {name: rows[4] for name, rows in SETS["cifar"].items()}
    deviation = {
        name: corrupt(grey, name, 5).std().item() for name in ("gaussian_noise", "shot_noise", "speckle_noise")
    }
    assert deviation["gaussian_noise"] == pytest.approx(small["gaussian_noise"][0], rel=0.02)
    assert deviation["shot_noise"] == pytest.approx(math.sqrt(0.4 / small["shot_noise"][0]), rel=0.02)
    assert deviation["speckle_noise"] == pytest.approx(0.4 * small["speckle_noise"][0], rel=0.02)
    for severity, mean in ((1, 0.4), (5, 0.4)):
        assert corrupt(grey, "shot_noise", severity).mean().item() == pytest.approx(mean, rel=0.01)
    salted = corrupt(grey, "impulse_noise", 5)
    assert (salted == 1).float().mean().item() == pytest.approx(0.035, rel=0.05)
    assert (salted == 0).float().mean().item() == pytest.approx(0.035, rel=0.05)


@pytest.mark.parametrize("constants", ["cifar", "imagenet"])
def test_a_flat_picture_stays_flat_under_every_blur(constants: ConstantSet) -> None:
    flat = torch.full((1, 3, 48, 48), 0.3)
    blurs = ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "gaussian_blur")
    for name in (*blurs, "elastic_transform", "contrast"):
        out = corrupt(flat, name, 5, constants=constants)
        assert float((out - flat).abs().max()) < 1.1 / 255


def test_separable_filters_are_exact_in_any_order() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(5, 3, 40, 40, generator=generator)
    rows = np.abs(np.random.default_rng(0).normal(size=(40, 40)))
    rows /= rows.sum(axis=1, keepdims=True)
    order = torch.randperm(40, generator=generator)
    shuffled = filters.separable(x[..., order], rows, rows[:, order.numpy()])
    assert torch.equal(filters.separable(x, rows, rows), shuffled)


def test_numbers_are_uniform_and_unrelated() -> None:
    numbers = draws.Draws.of(0, "fog", 0, 20000, torch.device("cpu")).numbers(3)
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert np.allclose(numbers.mean(axis=0), 0.5, atol=0.01)
    assert np.allclose(numbers.var(axis=0), 1 / 12, atol=0.003)
    correlation = np.corrcoef(np.concatenate([numbers[:-1].T, numbers[1:].T]))
    assert np.abs(correlation - np.eye(6)).max() < 0.04


def test_every_corruption_has_five_severities_in_both_sets() -> None:
    assert len(CORRUPTIONS) == 15
    for table in SETS.values():
        assert set(table) == {*CORRUPTIONS, *DEVELOPMENT}
        assert all(len(rows) == 5 and len({len(row) for row in rows}) == 1 for rows in table.values())
