"""The user's images are found wherever they lie; broken ones are skipped, counted and named, in workers too."""

import io
import pickle
import tarfile
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

import undrift
from faults import missing
from undrift import DataError, UndriftWarning
from undrift.images import Preprocess

SMALL = Preprocess(resize=(8, 8))
GREY = Preprocess(mean=(0.0,), std=(1.0,))


@pytest.fixture
def folder(tmp_path, plant, picture):
    """Six good images, in two folders, and three broken ones; files that are no images do not count."""
    root = plant(tmp_path / "clinic", ["a", "b/deep"], count=3)
    (root / "a" / "cut.png").write_bytes(picture(50)[:100])
    (root / "a" / "empty.jpg").write_bytes(b"")
    (root / "b" / "text.JPEG").write_text("no image")
    (root / "a" / "notes.txt").write_text("no image")
    (root / "a" / "._1.png").write_bytes(b"left by macOS")
    return root


@pytest.mark.parametrize("workers", [0, 2])
def test_broken_images_are_skipped_counted_and_named(folder, workers):
    domain = undrift.images.domain(folder, preprocess=SMALL)
    batches = domain.named_batches(2, workers=workers)
    assert len(domain) == 9
    with pytest.warns(UndriftWarning, match="3 of 9 images could not be read and were skipped") as record:
        pairs = list(batches)
    assert len(record) == 1
    names = [name for _, batch in pairs for name in batch]
    assert len(names) == sum(len(images) for images, _ in pairs) == 6
    assert {name.rpartition("/")[2] for name in batches.skipped.reasons} == {"cut.png", "empty.jpg", "text.JPEG"}
    assert len(batches.skipped) == 3
    assert "not in a format that Pillow knows" in str(batches.skipped)
    assert len(list(batches)) == len(pairs)  # said once, not at every pass


def test_workers_and_this_process_give_the_same(folder):
    domain = undrift.images.domain(folder, preprocess=SMALL)
    with pytest.warns(UndriftWarning):
        alone = torch.cat([images for images, _ in domain.named_batches(4, workers=0)])
    with pytest.warns(UndriftWarning):
        helped = torch.cat([images for images, _ in domain.named_batches(4, workers=2)])
    assert torch.equal(alone, helped)


@pytest.mark.parametrize("workers", [0, 2])
def test_holding_a_domain_keeps_what_can_be_read(folder, workers):
    domain = undrift.images.domain(folder, preprocess=SMALL)
    with pytest.warns(UndriftWarning, match="3 of 9 images"):
        held = domain.hold(workers=workers)
    with pytest.warns(UndriftWarning):
        streamed = list(domain.named_batches(3, workers=0))
    assert held.images.shape == (6, 3, 8, 8)
    assert held.images.dtype == torch.uint8
    assert len(held.skipped) == 3
    assert held.names == tuple(name for _, names in streamed for name in names)
    resident = torch.cat([images for images, _ in held.named_batches(4)])
    assert torch.equal(resident, torch.cat([images for images, _ in streamed]))


def test_a_held_domain_is_normalised_once(tmp_path, plant):
    halves = Preprocess(mean=(0.5,) * 3, std=(0.5,) * 3, resize=(9, 9), crop=8)
    domain = undrift.images.domain(plant(tmp_path / "a", ["x"], 3), preprocess=halves)
    (streamed, _), (resident, _) = next(iter(domain.named_batches(3))), next(iter(domain.hold().named_batches(3)))
    assert torch.equal(streamed, resident)
    assert resident.min() < -0.5


def test_nothing_but_broken_images_is_an_error(tmp_path):
    (tmp_path / "a.png").write_bytes(b"?")
    for read in (lambda domain: list(domain.named_batches(2)), lambda domain: domain.hold()):
        with pytest.raises(DataError, match=r"1 of 1 images could not be read .* needed: at least one"):
            read(undrift.images.domain(tmp_path))


def test_the_rest_of_a_domain_may_be_broken(folder):
    rest = undrift.images.domain(folder, preprocess=SMALL).select([3, 4])
    assert [source.name.rpartition("/")[2] for source in rest.sources] == ["cut.png", "empty.jpg"]
    with pytest.raises(DataError, match="at least one that can be read"):
        list(rest._batches(list, 2, None, False, "cpu", None))
    batches = rest._batches(list, 2, None, False, "cpu", None, True)
    with pytest.warns(UndriftWarning, match="2 of 2 images could not be read and were skipped"):
        assert list(batches) == []


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("odd", ["a.png", "b.png", "c.png"])
def test_an_image_of_another_size_is_named(tmp_path, picture, odd, workers):
    for seed, name in enumerate(("a.png", "b.png", "c.png")):
        (tmp_path / name).write_bytes(picture(seed, (10, 10) if name == odd else (12, 10)))
    domain = undrift.images.domain(tmp_path)
    facts = (
        rf"{odd} has 10×10 pixels, the usual size of its batch \(2 of 3\) is 12×10; needed: one size\. "
        r".*resize=\(12, 10\); on the command line --resize 12x10\)"
    )
    with pytest.raises(DataError, match=facts):
        list(domain.named_batches(3, workers=workers))
    sizes = [images.shape[2] for images, _ in domain.named_batches(1, workers=workers)]  # not met in one batch
    assert sorted(sizes) == [10, 12, 12]


def test_a_held_domain_names_the_image_of_another_size(tmp_path, picture):
    for seed in range(64):  # read at a time
        (tmp_path / f"a{seed:02}.png").write_bytes(picture(seed, (12, 10)))
    (tmp_path / "c.png").write_bytes(picture(64, (10, 10)))
    with pytest.raises(
        DataError, match=r"c\.png has 10×10 pixels, that of the 64 before it is 12×10; needed: one size"
    ):
        undrift.images.domain(tmp_path).hold()


def test_too_small_and_too_deep_images_are_skipped_with_their_reason(tmp_path, picture):
    (tmp_path / "good.png").write_bytes(picture(0, (32, 32)))
    (tmp_path / "small.png").write_bytes(picture(1, (12, 10)))
    Image.fromarray(np.zeros((32, 32), np.uint16)).save(tmp_path / "deep.png")
    with pytest.warns(UndriftWarning, match="2 of 3 images"):
        held = undrift.images.domain(tmp_path, preprocess=Preprocess(crop=16)).hold()
    reasons = {name.rpartition("/")[2]: reason for name, reason in held.skipped.reasons.items()}
    assert len(held) == 1
    assert "more than 8 bits" in reasons["deep.png"]
    assert "an image of 12×10 pixels" in reasons["small.png"]


def test_palettes_with_transparency_and_grey_images_become_rgb(tmp_path):
    palette = Image.new("P", (8, 8))
    palette.save(tmp_path / "palette.png", transparency=b"\x00\x80")
    Image.new("L", (8, 8), 7).save(tmp_path / "grey.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert undrift.images.domain(tmp_path).hold().images.shape == (2, 3, 8, 8)


def test_a_tar_gives_the_same_as_its_folder_and_is_never_extracted(tmp_path, plant, picture):
    root = plant(tmp_path / "tree", ["a", "b"], 2)
    path = tmp_path / "tree.tar"
    with tarfile.open(path, "w") as tar:
        tar.add(root, "tree")
        evil = tarfile.TarInfo("../../evil.png")
        evil.size = len(picture(9))
        tar.addfile(evil, io.BytesIO(picture(9)))
        link = tarfile.TarInfo("tree/link.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    before = sorted(tmp_path.rglob("*"))
    domain = pickle.loads(pickle.dumps(undrift.images.domain(path, preprocess=SMALL)))
    (images, names), (expected, _) = (
        next(iter(each.named_batches(4, workers=1))) for each in (domain, undrift.images.domain(root, preprocess=SMALL))
    )
    assert {name.rpartition(".tar/")[2] for name in names} == {f"tree/{c}/{i}.png" for c in "ab" for i in range(2)}
    order = sorted(range(4), key=lambda i: names[i])
    assert torch.equal(images[order], expected)
    assert len(domain) == 6  # the fifth is read in place like any other, and the link leads nowhere
    with pytest.warns(
        UndriftWarning, match=r"1 of 6 images .*link\.png \(a link to /etc/passwd, which is not in the tar"
    ):
        assert len(domain.hold(workers=0)) == 5
    assert sorted(tmp_path.rglob("*")) == before


def test_a_compressed_tar_is_refused(tmp_path, plant):
    with tarfile.open(tmp_path / "a.tar", "w:gz") as tar:
        tar.add(plant(tmp_path / "tree", ["a"]), "tree")
    with pytest.raises(DataError, match=r"needed: an uncompressed \.tar.*gunzip"):
        undrift.images.domain(tmp_path / "a.tar")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])  # the second as Windows writes it
def test_a_list_names_files_with_or_without_labels(tmp_path, plant, encoding):
    plant(tmp_path, ["my images"], 3)
    lines = "my images/0.png\n\nmy images/1.png 3\nmy images/2.png\t12\nmissing.png\n"
    (tmp_path / "list.txt").write_text(lines, encoding=encoding)
    domain = undrift.images.domain(tmp_path / "list.txt")
    with pytest.warns(UndriftWarning, match=r"1 of 4 images .*missing\.png"):
        held = domain.hold()
    assert [name.rpartition("/")[2] for name in held.names] == ["0.png", "1.png", "2.png"]
    assert "No such file" in str(held.skipped)


@pytest.mark.parametrize(
    ("shape", "preprocess"),
    [((3, 8, 8, 3), SMALL), ((3, 8, 8), SMALL), ((3, 8, 8), GREY)],
)
def test_an_array_is_mapped_and_needs_no_pillow(tmp_path, shape, preprocess):
    array = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    np.save(tmp_path / "images.npy", array)
    with missing("PIL"):
        held = undrift.images.domain(tmp_path / "images.npy", preprocess=preprocess).hold()
    assert held.names[2] == f"{tmp_path / 'images.npy'}[2]"
    expected = torch.from_numpy(array if array.ndim == 4 else array[..., None]).permute(0, 3, 1, 2)
    assert torch.equal(held.images, expected.expand(3, preprocess.channels, 8, 8))


def test_arrays_that_are_not_images_are_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((2, 8, 8, 3), np.float32))
    with pytest.raises(DataError, match=r"float32 of shape \(2, 8, 8, 3\); needed: images as uint8"):
        undrift.images.domain(tmp_path / "a.npy")
    np.save(tmp_path / "b.npy", np.array([{"code": 1}]), allow_pickle=True)
    with pytest.raises(DataError, match="pickled objects, which undrift never loads"):
        undrift.images.domain(tmp_path / "b.npy")


@pytest.mark.parametrize(
    ("shape", "one"), [((40, 30, 3), np.s_[None]), ((40, 30, 1), np.s_[None]), ((40, 30, 4), np.s_[None, ..., :3])]
)
def test_one_photograph_is_not_a_stack_of_grey_images(tmp_path, shape, one):
    array = np.zeros(shape, np.uint8)
    np.save(tmp_path / "a.npy", array)
    facts = rf"one image of 40×30, or 40 grey ones of 30×{shape[2]}; needed: a shape that says which\. Save array\[None"
    with pytest.raises(DataError, match=facts):
        undrift.images.domain(tmp_path / "a.npy")
    for said, count in ((array[one], 1), (array[..., None], 40)):
        np.save(tmp_path / "a.npy", said)
        assert len(undrift.images.domain(tmp_path / "a.npy").hold()) == count


@pytest.mark.parametrize("shape", [(2, 0, 8, 3), (2, 8, 0), (2, 0, 0, 1)])
def test_an_array_of_images_without_a_pixel_is_refused(tmp_path, shape):
    np.save(tmp_path / "a.npy", np.zeros(shape, np.uint8))
    with pytest.raises(DataError, match=r"images without a pixel \(shape .* needed: a height and a width of 1 or more"):
        undrift.images.domain(tmp_path / "a.npy")


def test_an_image_that_resizes_to_more_than_memory_is_skipped(tmp_path, picture):
    (tmp_path / "good.png").write_bytes(picture(0))
    (tmp_path / "thread.png").write_bytes(picture(1, (20_000, 1)))
    with pytest.warns(UndriftWarning, match="1 of 2 images"):
        held = undrift.images.domain(tmp_path, preprocess=Preprocess(resize=256, crop=224)).hold()
    (reason,) = held.skipped.reasons.values()
    assert "20000×1 pixels was given, which a shorter side of 256 makes 1,310,720,000 pixels" in reason


def test_places_without_images_get_three_facts(tmp_path):
    with pytest.raises(DataError, match=r"there is no .*nowhere; needed: a folder .* Check the path"):
        undrift.images.domain(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"is empty, no image among it; needed: a folder"):
        undrift.images.domain(tmp_path)
    (tmp_path / "a.pdf").write_text("")
    with pytest.raises(DataError, match=r"holds a\.pdf, no image among it"):
        undrift.images.domain(tmp_path)


def test_without_pillow_the_extra_is_named(tmp_path, picture):
    (tmp_path / "a.png").write_bytes(picture(0))
    with missing("PIL"), pytest.raises(DataError, match=r"Pillow is not installed; .*undrift\[images\]"):
        undrift.images.domain(tmp_path).hold()


def test_an_exif_orientation_is_ignored_as_documented(tmp_path):
    image, turned = Image.new("RGB", (6, 4)), Image.Exif()
    turned[0x0112] = 6  # a viewer would turn it by a quarter
    image.save(tmp_path / "a.jpg", exif=turned)
    ((batch, _),) = undrift.images.domain(tmp_path).named_batches(1)
    assert batch.shape == (1, 3, 4, 6)
