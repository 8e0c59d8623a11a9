"""Steps over epochs see images from other sides, where no label changes under it and nobody augments them already."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import undrift
from support import same, snapshot, varied

pytestmark = pytest.mark.filterwarnings("ignore::undrift.UndriftWarning")


class Looking(nn.Module):
    """Remembers what it was shown in steps: passes with gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.last = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.seen.append(x.detach())
        return self.last(self.norm(self.body(x)).relu().mean((2, 3)))


def sides(image: Tensor, far: int) -> dict[tuple[bool, int, int], Tensor]:
    """Return an image as it is and mirrored, moved by up to so many pixels; what comes in is the border reflected."""
    found = {}
    for mirrored, given in ((False, image), (True, image.flip(-1))):
        wide = F.pad(given[None], (far,) * 4, mode="reflect")[0]
        for down in range(-far, far + 1):
            for right in range(-far, far + 1):
                rows, columns = slice(far - down, far - down + 32), slice(far - right, far - right + 32)
                found[mirrored, down, right] = wide[:, rows, columns]
    return found


def looked(images: Tensor, epochs: int = 1, **given: Any) -> tuple[Looking, undrift.History]:
    torch.manual_seed(0)
    net = varied(Looking(), images)
    net.seen.clear()
    order = torch.Generator().manual_seed(1)
    history = undrift.adapt(net, images, epochs=epochs, batch_size=len(images), generator=order, **given)
    return net, history


def test_each_image_is_seen_from_a_side_of_its_own_and_another_in_the_next_epoch() -> None:
    x = torch.rand(16, 3, 32, 32)
    net, _ = looked(x, epochs=2, step_views=("mirror", "shift"))
    assert len(net.seen) == 2
    known = [dict(sides(image, 2).items()) for image in x]
    drawn = [[] for _ in net.seen]  # type: ignore[var-annotated]
    for batch, found in zip(net.seen, drawn, strict=True):
        for seen in batch:  # in a mixed order
            of_image = [
                (place, side)
                for place, all_sides in enumerate(known)
                for side, view in all_sides.items()
                if torch.equal(view, seen)
            ]
            assert len(of_image) == 1
            found += of_image
    assert [sorted(place for place, _ in found) for found in drawn] == [list(range(16))] * 2
    assert len({side for _, side in drawn[0]}) > 8
    assert {mirrored for _, (mirrored, _, _) in drawn[0]} == {False, True}
    assert dict(drawn[0]) != dict(drawn[1])


@pytest.mark.parametrize("names", [("mirror",), ("shift",)])
def test_only_the_named_views_are_drawn(names: tuple[str, ...]) -> None:
    x = torch.rand(16, 3, 32, 32)
    net, _ = looked(x, step_views=names)
    far = 2 * ("shift" in names)
    known = [
        view for image in x for (mirrored, _, _), view in sides(image, far).items() if not mirrored or "mirror" in names
    ]
    assert all(any(torch.equal(seen, view) for view in known) for seen in net.seen[0])


def test_images_that_the_caller_augments_stay_as_they_are() -> None:
    x = torch.rand(16, 3, 32, 32)
    net, _ = looked(x, clean=x, step_views=("mirror", "shift"))
    assert {tuple(seen.flatten().tolist()) for seen in net.seen[0]} == {tuple(image.flatten().tolist()) for image in x}


def test_the_default_draws_the_views_that_pass_the_test_without_labels() -> None:
    torch.manual_seed(3)
    bright = (torch.arange(96) % 2).view(-1, 1, 1, 1)
    x = 0.8 * bright + 0.2 * torch.rand(96, 3, 32, 32)
    net, history = looked(x)
    assert history.views == ("mirror", "shift")  # brightness is the same in a mirror
    given = {image.sum().item() for image in x}
    assert not all(seen.sum().item() in given for seen in net.seen[0])
    plain, _ = looked(x, answer_views=())  # who rules views out for answers does so for steps
    assert all(seen.sum().item() in given for seen in plain.seen[0])
    few, _ = looked(x[:20])  # too few to tell
    assert {tuple(s.flatten().tolist()) for s in few.seen[0]} == {tuple(image.flatten().tolist()) for image in x[:20]}


def test_a_run_that_resumes_draws_the_same(tmp_path: Path) -> None:
    def model() -> undrift.Perturbed:
        torch.manual_seed(0)
        given = {"step_views": ("mirror", "shift"), "generator": torch.Generator().manual_seed(1)}
        return undrift.perturb(Looking(), **given)

    def run(of: undrift.Perturbed, path: Path | None, stop: bool = False) -> None:
        calls = []

        def loss(logits: Tensor) -> Tensor:
            calls.append(1)
            if stop and len(calls) == 6:
                raise KeyboardInterrupt
            return undrift.entropy(logits)

        torch.manual_seed(2)
        undrift.adapt(of, torch.rand(24, 3, 32, 32), loss, 3, batch_size=6, checkpoint=path)

    whole, stopped, resumed = model(), model(), model()
    run(whole, None)
    with pytest.raises(KeyboardInterrupt):
        run(stopped, tmp_path / "run", stop=True)
    run(resumed, tmp_path / "run")
    assert same(snapshot(resumed), snapshot(whole))
    assert not same(snapshot(stopped), snapshot(whole))
