"""Preprocessing gives the same from tensors and from Pillow, and survives being written down."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from undrift import DataError, OptionError
from undrift.images import IMAGENET, SHOT, Preprocess

GREY = Preprocess(mean=(0.0,), std=(1.0,))


@pytest.fixture
def pixels():
    smooth = np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(smooth).resize((61, 80), Image.Resampling.BICUBIC))


def batch(pixels):
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None]


def test_uint8_and_float_images_give_the_same(pixels):
    images = batch(pixels)
    torch.testing.assert_close(Preprocess()(images), Preprocess()(images.float() / 255))
    assert Preprocess()(images).dtype == torch.float32


def test_normalising_is_the_formula(pixels):
    images = batch(pixels)
    expected = (images / 255 - torch.tensor(IMAGENET.mean).view(3, 1, 1)) / torch.tensor(IMAGENET.std).view(3, 1, 1)
    torch.testing.assert_close(IMAGENET.normalise(images), expected)


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic"])
@pytest.mark.parametrize("resize", [48, 96, (50, 44)])
def test_tensors_and_pillow_agree(pixels, interpolation, resize):
    preprocess = Preprocess(resize=resize, crop=32, interpolation=interpolation)
    from_pillow = preprocess.frame_image(Image.fromarray(pixels))
    from_tensor = preprocess.frame(batch(pixels))[0]
    assert from_pillow.shape == from_tensor.shape == (3, 32, 32)
    off = (from_pillow.int() - from_tensor.int()).abs() > 1
    assert off.float().mean() <= (0.05 if interpolation == "nearest" else 0)  # nearest: ties may go either way


def test_shorter_side_is_resized_and_the_centre_kept(pixels):
    assert Preprocess(resize=30).frame(batch(pixels)).shape == (1, 3, 39, 30)
    assert torch.equal(Preprocess(crop=21).frame(batch(pixels)), batch(pixels)[..., 30:51, 20:41])


def test_one_pillow_image_is_a_batch_of_one(pixels):
    image = Image.fromarray(pixels)
    assert torch.equal(SHOT.image(image), SHOT.normalise(SHOT.frame_image(image)[None])[0])
    assert GREY.image(image).shape == (1, 80, 61)


@pytest.mark.parametrize(
    "preprocess",
    [Preprocess(), GREY, IMAGENET, SHOT, Preprocess(interpolation="bicubic")],
)
def test_it_survives_json(preprocess):
    assert Preprocess.from_dict(json.loads(json.dumps(preprocess.to_dict()))) == preprocess


def test_an_unknown_field_is_not_passed_over():
    with pytest.raises(DataError, match=r"names gamma; known: crop, .*update undrift"):
        Preprocess.from_dict({**Preprocess().to_dict(), "gamma": 2})


def test_differences_are_named():
    assert IMAGENET.differences(IMAGENET) == []
    assert IMAGENET.differences(SHOT) == ["resize: 256 against (256, 256)"]
    assert IMAGENET.without_resize().resize is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mean": (0.5,)}, "1 means and 3 deviations"),
        ({"std": (1.0, 0.0, 1.0)}, "must be positive"),
        ({"interpolation": "lanczos"}, "'lanczos' does not exist; needed: one of nearest"),
        ({"resize": 200, "crop": 224}, "resize=200 and crop=224 do not fit"),
        ({"resize": 0}, "resize=0"),
    ],
)
def test_impossible_values_are_refused(values, message):
    with pytest.raises(OptionError, match=message):
        Preprocess(**values)


def test_wrong_batches_are_refused(pixels):
    with pytest.raises(DataError, match=r"shape \(1, 3, 80, 61\) was given; needed: N×1×H×W"):
        GREY(batch(pixels))
    with pytest.raises(DataError, match=r"torch\.int64 were given; needed: uint8"):
        Preprocess()(batch(pixels).long())
    with pytest.raises(DataError, match="an image of 80×61 pixels was given; needed: at least 64×64"):
        Preprocess(crop=64)(batch(pixels))


@pytest.mark.parametrize("resize", [None, 256, (8, 8)])
@pytest.mark.parametrize("size", [(0, 5), (5, 0)])
def test_an_image_without_a_pixel_gets_three_facts(size, resize):
    facts = rf"an image of {size[0]}×{size[1]} pixels was given; needed: at least 1×1"
    with pytest.raises(DataError, match=facts):
        Preprocess(resize=resize).frame(torch.zeros(1, 3, *size, dtype=torch.uint8))


def test_a_thread_is_not_resized_to_fill_the_memory():
    with pytest.raises(
        DataError, match=r"1×20000 pixels was given, .* 1,310,720,000 pixels; needed: at most 89,478,485"
    ):
        Preprocess(resize=256).frame(torch.zeros(1, 3, 1, 20_000, dtype=torch.uint8))
