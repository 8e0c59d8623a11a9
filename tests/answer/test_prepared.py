"""Where a domain is prepared otherwise than its network expects, that is said; and nowhere else."""

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import undrift
from adapt_support import small
from undrift.images import IMAGENET, SHOT, FileDomain, Preprocess, TensorDomain

RAW, GREY = Preprocess(), Preprocess(mean=(0.0,), std=(1.0,))
HALVES = Preprocess(mean=(0.5,) * 3, std=(0.2,) * 3)


def unlike(expected: Preprocess, domain: FileDomain | TensorDomain) -> list[str]:
    """Return what a warning says of each difference."""
    model = small()
    model.preprocess = expected
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        undrift.stream(model, domain.named_batches(2))
    said = [str(w.message) for w in caught if "other preprocessing" in str(w.message)]
    return said[0].partition("expects (")[2].partition("; the model's first")[0].split("; ") if said else []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    image = pytest.importorskip("PIL.Image")
    for i in range(6):
        colours = torch.randint(256, (8, 8, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(i))
        image.fromarray(colours.numpy()).save(tmp_path / f"{i}.png")
    return tmp_path


def test_adapt_says_it_once_with_the_line_of_the_caller(folder: Path) -> None:
    model, domain = small(), undrift.images.domain(folder)
    model.preprocess = HALVES
    with pytest.warns(undrift.UndriftWarning, match=r"mean: \(0\.5, .* against \(0\.0, .*prepared") as caught:
        undrift.adapt(model, domain, undrift.entropy, epochs=1)
    mine = [w for w in caught if "preprocessing" in str(w.message)]
    assert [w.filename for w in mine] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        undrift.predict(model, domain)  # said already
        undrift.stream(model, domain.prepared(HALVES).named_batches(2))
        undrift.stream(model, [torch.zeros(2, 3, 8, 8)])
        model.preprocess = None
        undrift.stream(model, domain.prepared(IMAGENET).named_batches(2))
        undrift.predict(model.remove(), domain)


def test_batches_of_a_domain_are_known(folder: Path) -> None:
    files = undrift.images.domain(folder)
    held = TensorDomain("held", torch.zeros(4, 3, 8, 8, dtype=torch.uint8))
    for domain in (files, held):
        model = small()
        model.preprocess = HALVES
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            undrift.stream(model, domain.prepared(HALVES).named_batches(2))
        with pytest.warns(undrift.UndriftWarning, match="other preprocessing than model.preprocess"):
            undrift.stream(model, domain.named_batches(2))


@pytest.mark.parametrize(
    ("expected", "own"),
    [
        (RAW, RAW),
        (HALVES, replace(HALVES, mean=(0.5004, 0.5, 0.4999))),  # rounded otherwise
        (replace(RAW, resize=(8, 8)), RAW),  # the files are that large
        (replace(RAW, resize=(16, 16), crop=16), replace(RAW, resize=(16, 16))),
        (replace(RAW, resize=16), replace(RAW, resize=(16, 16))),  # square
        (replace(RAW, interpolation="bicubic"), RAW),  # nobody resizes
        (IMAGENET, IMAGENET.without_resize()),  # as ImageNet-C's files, which are resized already
    ],
)
def test_one_function_in_two_spellings(folder: Path, expected: Preprocess, own: Preprocess) -> None:
    assert unlike(expected, undrift.images.domain(folder, preprocess=own)) == []


@pytest.mark.parametrize(
    ("expected", "own", "names"),
    [
        (HALVES, RAW, ["mean", "std"]),
        (GREY, RAW, ["mean", "std"]),
        (replace(RAW, resize=16), RAW, ["resize"]),
        (replace(RAW, resize=16, crop=12), replace(RAW, resize=16), ["crop"]),
        (SHOT, replace(SHOT, interpolation="nearest"), ["interpolation"]),
    ],
)
def test_what_differs_is_named(folder: Path, expected: Preprocess, own: Preprocess, names: list[str]) -> None:
    assert [line.partition(":")[0] for line in unlike(expected, undrift.images.domain(folder, preprocess=own))] == names


def test_images_in_memory_are_framed_already(folder: Path) -> None:
    framed = replace(HALVES, resize=16, crop=12)
    held = undrift.images.domain(folder, preprocess=framed).hold()
    assert unlike(framed, held) == []
    assert unlike(replace(framed, crop=10), held) == ["resize: 16 against None", "crop: 10 against None"]
    done = TensorDomain("normalised", torch.randn(4, 3, 12, 12))
    assert unlike(framed, done) == []
    assert unlike(RAW, replace(done, images=torch.zeros(0, 3, 4, 4))) == []


def test_a_first_image_that_cannot_be_read_does_not_hide_it(folder: Path) -> None:
    (folder / "0.png").write_bytes(b"no picture")
    assert unlike(replace(RAW, resize=16), undrift.images.domain(folder)) == ["resize: 16 against None"]
