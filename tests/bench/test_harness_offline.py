"""What an offline cell's numbers are of: its seed, centre crops to look at, unseen source images, the source's mask."""

from pathlib import Path
from typing import Any

import pytest
import torch

import undrift
from tree_support import masks_in
from undrift.images import TensorDomain
from undrift_bench.bench import Request
from undrift_bench.bench.offline import masked as offline_masked
from undrift_bench.bench.offline.benchmark import Offline
from undrift_bench.bench.offline.run import Adapting, _source_mask
from undrift_bench.bench.offline.sets import asked
from undrift_bench.bench.offline.sources import Images, Sources
from undrift_bench.bench.offline.tiny import IMAGES, TINY, TinyShot, tiny_setup
from undrift_bench.train import run as train_run
from undrift_bench.zoo import masked


@pytest.mark.parametrize("seed", [0, 1])
def test_a_cell_has_its_seed_and_looks_at_centre_crops(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(results=tmp_path, tiny=True, seeds=2, device="cpu", only=("shot",), settings=("photo-sketch",))
    adapting = Adapting(tiny_setup(asked(request)), request)
    cell, original, seen = Offline().cells(request)[seed], undrift.adapt, dict[str, Any]()

    def spy(net: Any, target: TensorDomain, **how: Any) -> Any:
        seen.update(how, target=target, drawn_from=torch.initial_seed())
        return original(net, target, **how)

    monkeypatch.setattr(undrift, "adapt", spy)
    torch.manual_seed(99)  # whatever ran before
    adapting.adapted(cell, TinyShot(4), adapting.images("sketch"), lambda: None)
    assert (cell.seed, seen["drawn_from"], seen["generator"].initial_seed()) == (seed, seed, seed)
    views = {name: [seen[name].preprocess(seen[name].images) for _ in range(2)] for name in ("target", "clean")}
    assert not torch.equal(*views["target"])  # what is learned from: random windows
    assert torch.equal(*views["clean"])  # what pseudo-labels and banks are made of
    torch.testing.assert_close(views["clean"][0], TINY(adapting.images("sketch").images))


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
def test_held_out_images_are_those_that_the_source_was_not_trained_on(
    seed: int, masks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:

    trained: list[torch.Tensor] = []
    for module in (train_run, offline_masked):
        original = module.frames

        def spy(domain: TensorDomain, *how: Any, original: Any = original) -> Any:
            trained.append(domain.images)
            return original(domain, *how)

        monkeypatch.setattr(module, "frames", spy)
    request = Request(tiny=True, device="cpu")
    setup = tiny_setup(asked(request))
    sources = Sources(setup, Images(setup, request), request)
    sources.network("photo", seed, masks)
    first, held = (
        {image.numpy().tobytes() for image in part} for part in (trained[0], sources.held_out("photo", seed).images)
    )
    assert not first & held
    assert len(first | held) == IMAGES


def test_the_source_is_asked_under_its_own_mask() -> None:
    torch.manual_seed(0)
    net = masked(TinyShot(4)).eval()
    before = masks_in(net)
    assert before is not None
    source, target = before.masks().detach().clone()
    assert not torch.equal(source, target)
    images = torch.rand(24, 3, 16, 16)
    model = undrift.adapt(net, images, method="gsfda", epochs=1, batch_size=12, progress=False).model
    assert model is not None
    masks = masks_in(model)
    assert masks is not None
    assert torch.equal(masks.masks()[masks.chosen[0]], target)
    with _source_mask(model):
        assert [torch.equal(masks.masks()[row], source) for row in masks.chosen] == [True]
    assert masks.chosen == (0,)
    with _source_mask(undrift.perturb(TinyShot(4))):  # a network without masks has nothing to turn on
        pass
