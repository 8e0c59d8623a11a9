"""What every corruption promises: shape, dtype, device, seeds, independence of the batch, and three-fact errors."""

import importlib.metadata
import importlib.util
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import undrift
from undrift.images.corrupt import CORRUPTIONS, DEVELOPMENT, corrupt

ALL = (*CORRUPTIONS, *DEVELOPMENT)
FIXED = ("defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression")
PLAIN = {"gaussian_blur", "saturate", *FIXED}
NOT_MONOTONE = {"elastic_transform", "glass_blur", "frost", "snow", "saturate"}


def smooth(count: int, side: int, grain: float = 0.1) -> Tensor:
    """Smooth coloured blobs with some grain, in [0, 1]."""
    generator = torch.Generator().manual_seed(5)
    blobs = F.interpolate(torch.rand(count, 3, 6, 6, generator=generator), size=(side, side), mode="bicubic")
    return (blobs * (1 - grain) + torch.rand(count, 3, side, side, generator=generator) * grain).clamp(0, 1)


@pytest.fixture(autouse=True)
def _pictures(request: pytest.FixtureRequest) -> None:
    """Skip frost and JPEG where their optional packages are missing."""
    if "frost" in request.node.name and importlib.util.find_spec("imagecorruptions") is None:
        pytest.skip("the frost pictures come with the wheel imagecorruptions, which is not installed")
    if "frost" in request.node.name or "jpeg" in request.node.name:
        pytest.importorskip("PIL", reason="frost and JPEG need Pillow")


@pytest.mark.parametrize("name", ALL)
def test_a_batch_is_its_parts_bit_for_bit(name: str) -> None:
    images = smooth(200, 32)
    together = corrupt(images, name, 5, seed=3)
    parts = [corrupt(images[a:b], name, 5, seed=3, first=a) for a, b in ((0, 1), (1, 14), (14, 200))]
    assert torch.equal(together, torch.cat(parts))


@pytest.mark.parametrize("name", ALL)
def test_a_batch_is_its_parts_with_the_large_constants_and_one_thread(name: str) -> None:
    images, threads = smooth(3, 100), torch.get_num_threads()
    together = [corrupt(images, name, severity) for severity in (1, 4)]
    try:
        torch.set_num_threads(1)
        alone = [corrupt(images[2:], name, severity, first=2) for severity in (1, 4)]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a[2:], b) for a, b in zip(together, alone, strict=True))


@settings(max_examples=15, deadline=None)
@given(cut=st.integers(1, 19), first=st.integers(0, 2**40), seed=st.integers(-(2**40), 2**40))
def test_any_cut_any_seed_any_index(cut: int, first: int, seed: int) -> None:
    images = smooth(20, 32)
    for name in ("gaussian_noise", "motion_blur"):
        together = corrupt(images, name, 3, seed, first)
        assert torch.equal(together[cut:], corrupt(images[cut:], name, 3, seed, first + cut))


@pytest.mark.parametrize("name", ALL)
def test_shape_dtype_and_input_are_kept(name: str) -> None:
    for dtype in (torch.uint8, torch.float32, torch.float64, torch.float16):
        unit = smooth(2, 32)
        images = (unit * 255).to(dtype) if dtype == torch.uint8 else unit.to(dtype)
        before = images.clone()
        out = corrupt(images, name, 5)
        assert (out.shape, out.dtype, out.device) == (images.shape, images.dtype, images.device)
        assert torch.equal(images, before)
        assert out.is_contiguous()
        assert dtype == torch.uint8 or (float(out.min()) >= 0 and float(out.max()) <= 1)


@pytest.mark.parametrize("name", ALL)
def test_uint8_is_the_float_result_cut_down(name: str) -> None:
    levels = (smooth(3, 32) * 255).to(torch.uint8)
    stored = corrupt(levels, name, 4).float()
    exact = corrupt(levels.float() / 255, name, 4) * 255
    assert float((exact - stored).min()) > -2e-3
    assert float((exact - stored).max()) < 1


@pytest.mark.parametrize("name", ALL)
def test_seed_and_index_choose_the_noise(name: str) -> None:
    images = smooth(1, 32).expand(6, -1, -1, -1)
    out = corrupt(images, name, 5)
    assert torch.equal(out, corrupt(images, name, 5, seed=0))
    other_seed, other_index = corrupt(images, name, 5, seed=1), corrupt(images, name, 5, first=6)
    if name in PLAIN:
        assert torch.equal(out, other_seed)
        assert torch.equal(out[0], out[1])
    else:
        assert not torch.equal(out, other_seed)
        assert not torch.equal(out, other_index)
        assert not torch.equal(out[0], out[1])


@pytest.mark.parametrize("name", sorted(set(ALL) - NOT_MONOTONE))
@pytest.mark.parametrize("side", [32, 128])
def test_error_rises_with_severity(name: str, side: int) -> None:
    images = smooth(24 if side == 32 else 4, side, grain=0)
    errors = [float((corrupt(images, name, severity) - images).square().mean()) for severity in range(1, 6)]
    assert errors[0] > 0
    # Level within 2 %: motion blur 3 and 4 (32×32) differ in a radius beyond the reach of σ, fog 3 and 4 in grain only
    assert all(after > 0.98 * before for before, after in pairwise(errors))
    assert errors[-1] > 1.2 * errors[0]


def test_the_global_generators_are_left_alone() -> None:
    images, state = smooth(2, 32), torch.get_rng_state()
    for name in ALL:
        if name != "frost":
            corrupt(images, name, 2)
    assert torch.equal(state, torch.get_rng_state())


def test_constants_follow_the_size_and_can_be_named() -> None:
    small, large = smooth(2, 32), smooth(2, 224)
    assert torch.equal(corrupt(small, "contrast", 1), corrupt(small, "contrast", 1, constants="cifar"))
    assert torch.equal(corrupt(large, "contrast", 1), corrupt(large, "contrast", 1, constants="imagenet"))
    assert not torch.equal(corrupt(small, "contrast", 1), corrupt(small, "contrast", 1, constants="imagenet"))


def test_sides_need_not_be_equal_or_even() -> None:
    images = smooth(2, 67)[:, :, :, :41]
    for name in ALL:
        if name != "frost":
            assert corrupt(images, name, 5).shape == images.shape
            assert corrupt(images[:0], name, 5).shape == (0, 3, 67, 41)


@pytest.mark.parametrize(
    ("images", "name", "severity", "error", "facts"),
    [
        (torch.rand(1, 3, 32, 32), "gausian_noise", 1, undrift.OptionError, "Did you mean 'gaussian_noise'"),
        (torch.rand(1, 3, 32, 32), "fog", 6, undrift.OptionError, "severity 6 does not exist; needed: 1"),
        (torch.rand(3, 32, 32), "fog", 1, undrift.DataError, r"shape \(3, 32, 32\); needed: N×3×H×W.*images\[None\]"),
        (torch.rand(1, 1, 32, 32), "fog", 1, undrift.DataError, r"shape \(1, 1, 32, 32\); needed"),
        (torch.rand(1, 3, 8, 8), "fog", 1, undrift.DataError, "sides of at least 16"),
        (torch.zeros(1, 3, 32, 32, dtype=torch.int64), "fog", 1, undrift.DataError, "are torch.int64; needed"),
        (torch.full((1, 3, 32, 32), 2.0), "fog", 1, undrift.DataError, "from 2 to 2; needed.*normalised"),
        (torch.full((1, 3, 32, 32), float("nan")), "fog", 1, undrift.DataError, "from nan to nan"),
    ],
)
def test_errors_say_what_was_found_needed_and_to_do(
    images: Tensor, name: str, severity: int, error: type[Exception], facts: str
) -> None:
    with pytest.raises(error, match=facts):
        corrupt(images, name, severity)


def test_errors_of_the_options() -> None:
    images = torch.rand(1, 3, 32, 32)
    with pytest.raises(undrift.OptionError, match=r"no set of constants 'cifar10'.*Did you mean 'cifar'"):
        corrupt(images, "fog", 1, constants="cifar10")  # type: ignore[arg-type]
    with pytest.raises(undrift.OptionError, match="first=-1"):
        corrupt(images, "fog", 1, first=-1)


def test_missing_pictures_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("PIL")
    images = torch.rand(1, 3, 32, 32)
    with pytest.raises(undrift.DataError, match=r"has no frost1.png; needed.*undrift\[frost\]"):
        corrupt(images, "frost", 1, frost=tmp_path)
    monkeypatch.setattr("undrift.images.corrupt.pictures.importlib.metadata.files", _not_installed)
    with pytest.raises(undrift.DataError, match=r"no frost pictures here; needed.*undrift\[frost\]"):
        corrupt(images, "frost", 1)


def _not_installed(name: str) -> None:
    raise importlib.metadata.PackageNotFoundError(name)


def test_frost_takes_crops_larger_than_its_pictures() -> None:
    assert corrupt(torch.rand(1, 3, 700, 620), "frost", 5).shape == (1, 3, 700, 620)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("name", ALL)
def test_gpu_batches_are_their_parts_and_resemble_the_cpu(name: str) -> None:
    images = smooth(40, 32).cuda()
    together = corrupt(images, name, 5)
    parts = [corrupt(images[a:b], name, 5, first=a) for a, b in ((0, 1), (1, 14), (14, 40))]
    assert torch.equal(together, torch.cat(parts))
    on_cpu = corrupt(images.cpu(), name, 5)
    error, other = ((out - images.cpu()).square().mean() for out in (together.cpu(), on_cpu))
    assert torch.isclose(error, other, rtol=0.25)
