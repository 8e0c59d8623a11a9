"""What offline cells are made of: views, decoded images, and source networks that are trained once."""

from dataclasses import replace

import pytest
import torch

import undrift
from tree_support import masks_in, small
from undrift import DataError, OptionError
from undrift_bench.bench import CannotRun, Request
from undrift_bench.bench.harness.run import run
from undrift_bench.bench.offline.benchmark import Offline
from undrift_bench.bench.offline.sets import SETS, asked
from undrift_bench.bench.offline.sources import HELD_OUT, Images, Sources, setup, shot_network
from undrift_bench.bench.offline.tiny import TINY
from undrift_bench.bench.offline.views import CentreView, RandomView, StopWatch, random_windows


def test_a_random_view_is_a_window_of_its_frame_perhaps_mirrored():
    images = torch.arange(2 * 3 * 6 * 7, dtype=torch.uint8).view(2, 3, 6, 7)
    seen = {(top, left): images[:, :, top : top + 4, left : left + 4] for top in range(3) for left in range(4)}
    found = set()
    for _ in range(60):
        for image, original in zip(random_windows(images, 4), range(2), strict=True):
            match = [
                (place, flipped)
                for place, window in seen.items()
                for flipped in (False, True)
                if torch.equal(image, window[original].flip(-1) if flipped else window[original])
            ]
            assert len(match) == 1
            found.add(match[0])
    assert {flipped for _, flipped in found} == {False, True}
    assert len({place for place, _ in found}) > 8


def test_views_normalise_as_the_preprocessing_does():
    images = torch.randint(0, 256, (3, 3, 20, 20), dtype=torch.uint8)
    centre = CentreView.of(TINY, fast=False)
    torch.testing.assert_close(centre(images), TINY(images))
    asked_for = []
    view = RandomView(
        **vars(CentreView.of(replace(TINY, resize=None, crop=20), True)), each=lambda: asked_for.append(1)
    )
    batch = view(images)
    assert batch.is_contiguous(memory_format=torch.channels_last)
    both = TINY.normalise(images), TINY.normalise(images).flip(-1)
    assert all(any(torch.allclose(row, one[i]) for one in both) for i, row in enumerate(batch))
    assert asked_for == [1]


def test_the_stop_watch_needs_two_batches():
    watch = StopWatch(torch.device("cpu"), 2)
    watch()
    assert watch.milliseconds is None
    watch()
    assert watch.milliseconds is not None
    assert watch.milliseconds >= 0


def test_images_are_decoded_once_and_shared(pacs, tmp_path):
    request = Request(data=pacs, cache=tmp_path / "cache", device="cpu")
    made_of = small(SETS["pacs"], request)
    with pytest.warns(undrift.UndriftWarning, match="publishes 1670"):
        held = Images(made_of, request)("photo")
    assert held.images.shape == (28, 3, 20, 20)
    assert held.preprocess == TINY
    (file,) = (tmp_path / "cache").glob("*.npz")
    for source in (pacs / "pacs" / "photo").rglob("*.png"):
        source.write_bytes(b"no image any more")
    with pytest.warns(undrift.UndriftWarning, match="publishes 1670"):
        again = Images(made_of, request)("photo")
    assert torch.equal(again.images, held.images)
    assert torch.equal(again.labels, held.labels)
    file.write_bytes(b"damaged")
    with (
        pytest.warns(undrift.UndriftWarning, match="publishes 1670"),
        pytest.raises(DataError, match="Delete it: it is made again"),
    ):
        Images(made_of, request)("photo")


@pytest.mark.filterwarnings("ignore:.*images; PACS publishes:undrift.UndriftWarning")
def test_a_source_is_trained_once_on_eighty_per_cent(pacs, tmp_path):
    request = Request(data=pacs, cache=tmp_path / "cache", device="cpu")
    made_of = small(SETS["pacs"], request)
    images = Images(made_of, request)
    sources = Sources(made_of, images, request)
    first = sources.network("photo", 0).state_dict()
    held = sources.held_out("photo", 0)
    assert len(held) == round(HELD_OUT * 28)
    (file,) = (tmp_path / "cache" / "sources").iterdir()
    written = file.stat().st_mtime_ns
    again = Sources(made_of, images, request).network("photo", 0).state_dict()
    assert file.stat().st_mtime_ns == written
    assert all(torch.equal(first[name], again[name]) for name in first)
    masks = masks_in(sources.network("photo", 0, masks=True))
    assert masks is not None
    assert masks.embedding.shape == (2, 6)
    assert len(list((tmp_path / "cache" / "sources").iterdir())) == 2


@pytest.mark.filterwarnings("ignore:.*images; PACS publishes:undrift.UndriftWarning")
def test_no_source_is_trained_that_would_end_too_late(pacs):
    request = Request(data=pacs, device="cpu")
    made_of = small(SETS["pacs"], request)
    sources = Sources(made_of, Images(made_of, request), request, before=0.0)
    with pytest.raises(CannotRun, match="Call again with more time"):
        sources.network("photo", 0)


def test_missing_files_are_no_failure_of_a_method(tmp_path):
    request = Request(data=tmp_path, results=tmp_path, device="cpu", seeds=1, only=("shot",), settings=("A-W",))
    said: list[str] = []
    outcome = run(Offline(), replace(request, extra={"dataset": "office31"}), said.append, quiet=True)
    assert (outcome.ran, outcome.failed, outcome.left) == (0, 0, 1)
    assert "Name the folder with --data" in said[0]
    real = setup(SETS["pacs"], request)
    with pytest.raises(CannotRun, match="--resnet50 FILE"):
        Sources(real, Images(real, request), request)._trunk()
    with pytest.raises(OptionError, match="did you mean 'office31'"):
        asked(Request(extra={"dataset": "office-31"}))


def test_the_layout_of_the_backbone_is_read_from_its_header(tmp_path):
    from safetensors.torch import save_file

    for layout, name in (("v1: stride on the first", "shot_resnet50_v1"), ("", "shot_resnet50")):
        save_file({"a": torch.zeros(1)}, tmp_path / "r.safetensors", {"layout": layout})
        assert shot_network(tmp_path / "r.safetensors") == name
    (tmp_path / "r.safetensors").write_bytes(b"no")
    with pytest.raises(DataError, match="cannot be read"):
        shot_network(tmp_path / "r.safetensors")
