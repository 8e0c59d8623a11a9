"""Unlabelled images in every form, each kept with its place, no label read; and bad ones."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

import undrift
from adapt_support import Labelled, Untouchable, small
from support import images, learnables, same, snapshot
from undrift import Step
from undrift.adapt import adapt
from undrift.images import TensorDomain
from undrift.likelihood import Shot, entropy

# An untrained network on random images may well end up with one answer for all; that is not the matter here.
pytestmark = pytest.mark.filterwarnings("ignore:COLLAPSED:undrift.UndriftWarning")


class Streamed(IterableDataset[Any]):
    def __init__(self, x: Tensor, shuffled: bool = False) -> None:
        self.x, self.shuffled = x, shuffled

    def __iter__(self) -> Iterator[Tensor]:
        yield from self.x[torch.randperm(len(self.x))] if self.shuffled else self.x


FORMS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda x: x,
    "array": lambda x: x.numpy(),
    "mirrored array": lambda x: np.flip(np.flip(x.numpy(), -1).copy(), -1),
    "dataset": Labelled,
    "loader": lambda x: DataLoader(Labelled(x), batch_size=8, shuffle=True),
    "loader of dicts": lambda x: DataLoader(Labelled(x, "dict"), batch_size=8, shuffle=True, drop_last=True),
    "loader with workers": lambda x: DataLoader(Labelled(x), batch_size=8, shuffle=True, num_workers=1),
    "list": lambda x: [(b, Untouchable()) for b in x.split(8)],
    "list of arrays": lambda x: [(b.numpy(), Untouchable()) for b in x.split(8)],
    "iterable data set": Streamed,
    "loader without places": lambda x: DataLoader(Streamed(x), batch_size=8),
    "domain": lambda x: TensorDomain("toy", (x * 255).to(torch.uint8), labels=None),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_images_keeps_each_with_its_place_and_reads_no_label(form: str) -> None:
    x = (images(20) * 255).round() / 255  # what a domain holds in bytes
    seen: list[tuple[Tensor, Tensor]] = []

    class Recording(Shot):
        def __call__(self, logits: Tensor, step: Step) -> Tensor:
            assert step.indices is not None
            seen.append((step.indices, step.images))
            return super().__call__(logits, step)

    history = adapt(small(), FORMS[form](x), Recording(), epochs=2, batch_size=8)
    for places, batch in seen:
        torch.testing.assert_close(batch, x[places])
    assert len(history.steps) == (4 if form == "loader of dicts" else 6)
    if form not in ("list", "list of arrays", "iterable data set", "loader without places", "loader of dicts"):
        assert sorted(torch.cat([places for places, _ in seen[:3]]).tolist()) == list(range(20))
        assert [p.tolist() for p, _ in seen[:3]] != [p.tolist() for p, _ in seen[3:]]  # shuffled anew


def test_a_subset_and_a_collate_function_are_kept() -> None:
    def twice(items: list[Any]) -> Tensor:
        return 2 * torch.stack([item[0] for item in items])

    x = images(20)
    sampler = torch.utils.data.SubsetRandomSampler([3, 5, 7, 9, 11])
    seen: list[Step] = []

    def recorded(logits: Tensor, step: Step) -> Tensor:
        seen.append(step)
        return entropy(logits)

    history = adapt(small(), DataLoader(Labelled(x), 3, sampler=sampler, collate_fn=twice), recorded, epochs=1)
    assert sorted(i for s in seen for i in s.indices.tolist()) == [3, 5, 7, 9, 11]
    assert all(torch.equal(s.images, 2 * x[s.indices]) for s in seen)
    assert history.surveys[0].samples == 5


def test_a_folder_of_images_with_a_broken_one(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for i in range(7):
        colour = tuple(int(v) for v in torch.randint(256, (3,)))
        image.new("RGB", (8, 8), colour).save(tmp_path / f"{i}.png")
    (tmp_path / "3.png").write_bytes(b"no picture")
    seen: list[int] = []

    def recorded(logits: Tensor, step: Step) -> Tensor:
        seen.extend(step.indices.tolist())
        return entropy(logits)

    with pytest.warns(undrift.UndriftWarning, match=r"1 of 7 images could not be read.*3\.png"):
        history = adapt(small(), undrift.images.domain(tmp_path), recorded, epochs=1)
    assert sorted(seen) == [0, 1, 2, 4, 5, 6]
    assert history.surveys[0].samples == 6


def test_what_cannot_be_gone_through_again_is_refused() -> None:
    model = small()
    with pytest.raises(undrift.DataError, match=r"generator, which gives its batches once.*undrift\.stream"):
        adapt(model, (b for b in images(8).split(4)), entropy)
    with pytest.raises(undrift.DataError, match=r"is a str.*undrift\.images\.domain"):
        adapt(model, "clinic-b", entropy)
    for empty in (images(0), Labelled(images(0)), [], TensorDomain("none", torch.zeros(0, 3, 8, 8))):
        with pytest.raises(undrift.DataError, match=r"no images|no batch"):
            adapt(model, empty, entropy)
    loader = DataLoader(Streamed(images(16), shuffled=True), batch_size=4)
    with pytest.raises(undrift.DataError, match="different images at the same position"):
        adapt(model, loader, Shot())
    history = adapt(model, loader, entropy, epochs=2)  # one that keeps no labels does not mind
    assert history.verdict is not None
    assert history.verdict.agreement is None


def test_labels_in_place_of_images_are_told_where_they_belong() -> None:
    labels = torch.zeros(8, dtype=torch.int64)
    for given in ((images(8), labels), [(labels, images(8))]):
        with pytest.raises(undrift.DataError, match=r"shape \(8,\) where images should be.*\[\(images, labels\)\]"):
            adapt(small(), given, entropy)
    with pytest.raises(undrift.DataError, match=r"shape \(3, 8, 8\); .*torch\.stack\(images\)"):
        adapt(small(), list(images(8)), entropy)


def test_an_order_that_changes_later_is_noticed() -> None:
    class Fickle:
        passes = 0

        def __iter__(self) -> Iterator[Tensor]:
            self.passes += 1
            yield from images(16, seed=int(self.passes > 4)).split(4)

    with pytest.raises(undrift.DataError, match="other images than in the first pass"):
        adapt(small(), Fickle(), Shot(), epochs=3)


def test_clean_images_are_looked_at_and_augmented_ones_trained_on() -> None:
    x = images(12)
    looked, stepped = [], []

    class Recording(Shot):
        def refresh(self, model: undrift.Perturbed, batches: Any) -> None:
            looked.extend(float(b.min()) for _, b in batches())
            super().refresh(model, batches)

        def __call__(self, logits: Tensor, step: Step) -> Tensor:
            stepped.append(float(step.images.max()))
            return super().__call__(logits, step)

    adapt(small(), x - 5, Recording(), epochs=1, clean=x)
    assert min(looked) >= 0
    assert max(stepped) < 0
    with pytest.raises(undrift.DataError, match="clean has 11 images, unlabelled 12"):
        adapt(small(), x, Shot(), clean=x[1:])


def test_images_with_nan_are_skipped_counted_and_named() -> None:
    x = images(20)
    broken = torch.cat([x[:4], torch.full((1, 3, 8, 8), torch.nan), x[4:], torch.full((1, 3, 8, 8), torch.inf)])
    model = small()
    with pytest.warns(undrift.UndriftWarning, match=r"2 images with NaN or infinity skipped \(at 4, 21\)") as caught:
        history = adapt(model, broken, Shot(), epochs=2, batch_size=10)
    assert caught[0].filename == __file__
    assert history.bad_images == (4, 21)
    assert history.surveys[0].samples == 20
    assert all(torch.isfinite(p).all() for p in learnables(model).values())
    assert "2 images with NaN or infinity skipped: 4, 21" in str(history)
    with pytest.raises(undrift.DataError, match="no finite output for any image"):
        adapt(small(), torch.full((8, 3, 8, 8), torch.nan), entropy)


def test_a_loss_that_is_not_finite_makes_no_step_and_leaves_no_trace() -> None:
    class Fuse:
        def __init__(self, bad: tuple[int, ...]) -> None:
            self.bad, self.calls = bad, 0

        def __call__(self, logits: Tensor, step: Step) -> Tensor:
            self.calls += 1
            return entropy(logits) * (torch.inf if self.calls in self.bad else 1)

    x = images(20)
    model, twin = small(), small()
    with pytest.warns(undrift.UndriftWarning, match="1 step not made"):
        history = adapt(model, [x[:10], x[10:]], Fuse((2,)), epochs=1)
    assert history.bad_steps == 1
    assert len(history.steps) == 1
    assert history.bad_images == ()
    adapt(twin, [x[:10], x[10:][:1]], entropy, epochs=1)  # the second batch is left out: it is a lone image
    for name in ("1.running_mean", "1.running_var"):
        assert torch.equal(model.net.state_dict()[name], twin.net.state_dict()[name])
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(undrift.DataError, match="made no step"):
        adapt(model, x, Fuse(tuple(range(99))), epochs=2)


@pytest.mark.parametrize("statistics", ["batch", "moving", "source"])
def test_a_last_batch_of_one_image(statistics: str) -> None:
    history = adapt(small(norm_statistics=statistics), images(9), Shot(), epochs=2, batch_size=4)
    assert history.lone_batches == (0 if statistics == "source" else 2)
    assert history.surveys[2].samples == 9
    single = adapt(small(), images(3), entropy, epochs=1, batch_size=1)  # asked for: not left out
    assert single.lone_batches == 0


class Failing(Dataset[Any]):
    """A data set that raises at its n-th item, once."""

    def __init__(self, x: Tensor, at: int) -> None:
        self.x, self.left = x, at

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        self.left -= 1
        if self.left == 0:
            raise OSError("the camera is gone")
        return self.x[i], Untouchable()


def test_a_loader_that_raises_midway_loses_nothing(tmp_path: Path) -> None:
    x = images(20)
    whole, model = small(), small()
    torch.manual_seed(11)
    adapt(whole, Labelled(x), entropy, epochs=2, batch_size=5)
    torch.manual_seed(11)
    failing = Failing(x, 20 + 20 + 20 + 12)  # the source's survey, an epoch, its survey, a part of the second epoch
    with pytest.raises(undrift.DataError, match=r"raised OSError \(the camera is gone\) in epoch 2.*checkpoint="):
        adapt(model, failing, entropy, epochs=2, batch_size=5, checkpoint=tmp_path / "run")
    assert torch.isfinite(model(x)).all()
    torch.manual_seed(99)
    adapt(model, failing, entropy, epochs=2, batch_size=5, checkpoint=tmp_path / "run")
    assert same(snapshot(model), snapshot(whole))
