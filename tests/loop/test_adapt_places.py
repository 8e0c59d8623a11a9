"""An image keeps its place whatever its loader does to batches; where it cannot, that is said."""

import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import undrift
from adapt_support import Labelled, small
from support import images, same, snapshot
from undrift import Step
from undrift.adapt import adapt
from undrift.likelihood import Shot, entropy

pytestmark = pytest.mark.filterwarnings("ignore:COLLAPSED:undrift.UndriftWarning")

Samples = list[Any]


def stacked(samples: Samples) -> Tensor:
    return torch.stack([sample[0] for sample in samples])


def brightness(sample: Any) -> float:
    return float(sample[0].mean())


class Noisy:
    """Augments in the collate function, each row with a draw of its own."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self.draw = draw

    def __call__(self, samples: Samples) -> Tensor:
        return torch.stack([x + self.draw() for x, _ in samples])


def in_place(samples: Samples) -> Tensor:
    for sample in samples:
        sample[0].mul_(2)
    return stacked(samples)


def centred(samples: Samples) -> Tensor:
    batch = stacked(samples)
    return (batch - batch.mean()) / batch.std()


def shuffled(samples: Samples) -> Tensor:
    random.shuffle(samples)
    return stacked(samples)


def padded(samples: Samples) -> Tensor:
    longest = max(1 + int(4 * brightness(sample)) for sample in samples)
    return torch.stack(
        [torch.nn.functional.pad(x.flip(-1) if torch.rand(()) < 0.5 else x, (0, longest)) for x, _ in samples]
    )


def some_jitter(samples: Samples) -> Tensor:
    """Draws for some samples only: those behind them get other numbers in another order."""
    return torch.stack([x + torch.rand(()) if x.mean() > 0.5 else x for x, _ in samples])


class Buffered:
    """Makes all batches in the same memory."""

    def __init__(self) -> None:
        self.memory = torch.empty(64, 3, 8, 8)

    def __call__(self, samples: Samples) -> Tensor:
        for at, (x, _) in enumerate(samples):
            self.memory[at] = x
        return self.memory[: len(samples)]


def by_brightness(samples: Samples) -> Tensor:
    return stacked(sorted(samples, key=brightness))


OWN = torch.Generator().manual_seed(5)
KEEPING: dict[str, Callable[[Samples], Any]] = {
    "plain": stacked,
    "dict": lambda s: {"labels": None, "image": stacked(s)},
    "batch statistics": centred,
    "in place": in_place,
    "torch": Noisy(lambda: float(torch.rand(()))),
    "numpy": Noisy(lambda: float(np.random.rand())),  # noqa: NPY002
    "python": Noisy(random.random),
    "a generator of its own": lambda s: stacked(s) + torch.rand(len(s), 1, 1, 1, generator=OWN),
    "some jitter": some_jitter,
    "padded": padded,
    "one buffer": Buffered(),
}
LOSING: dict[str, Callable[[Samples], Any]] = {
    "sorts": by_brightness,
    "reverses": lambda s: stacked(s[::-1]),
    "halves swapped": lambda s: stacked(s).roll(4, 0),
    "sorts and draws": lambda s: by_brightness(s) + torch.rand(len(s), 1, 1, 1),
    "shuffles": shuffled,
}


def plain() -> undrift.Perturbed:
    torch.manual_seed(0)
    return undrift.perturb(
        torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(), torch.nn.Linear(48, 3))
    )


def adapted(collate: Callable[[Samples], Any], count: int) -> undrift.History:
    return adapt(plain(), DataLoader(Labelled(images(count)), count, collate_fn=collate), Shot(), epochs=1)


@pytest.mark.parametrize("how", KEEPING)
@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_collate_function_that_keeps_the_order_is_believed(how: str, count: int) -> None:
    assert len(adapted(KEEPING[how], count).steps) == 1


@pytest.mark.parametrize("how", LOSING)
def test_one_that_does_not_is_found_out(how: str) -> None:
    with pytest.raises(undrift.DataError, match="collate_fn reorders the samples of a batch"):
        adapted(LOSING[how], 8)


@pytest.mark.parametrize(
    "how", ["torch", "numpy", "python", "in place", "sorts and draws", "one buffer", "some jitter"]
)
def test_to_ask_a_second_time_leaves_no_trace(how: str) -> None:
    collate = (KEEPING | LOSING)[how]
    made: list[Tensor] = []
    random_states: list[tuple[Any, Any]] = []

    def now() -> Any:
        _, keys, at, *_ = np.random.get_state()  # noqa: NPY002
        return torch.get_rng_state().tolist(), keys.tolist(), at, random.getstate()

    def watched(samples: Samples) -> Any:
        before = now()
        batch = collate(samples)
        made.append(batch.clone())
        random_states.append((before, now()))
        return batch

    model, given = plain(), []
    hook = model.net.register_forward_pre_hook(lambda _net, args: given.append(args[0].clone()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", undrift.UndriftWarning)  # of one that reorders
        adapt(model, DataLoader(Labelled(images(16)), 8, collate_fn=watched), entropy, epochs=1)
    hook.remove()
    # The first call makes the first batch, the second one asks, the third makes the second batch.
    (started, ended), (asked, _), (after, _), *_ = random_states
    assert asked == started
    assert after == ended
    assert torch.equal(given[0], made[0])
    assert torch.equal(given[1], made[2])


@pytest.mark.parametrize("workers", [0, 1])
def test_pseudo_labels_want_an_order_that_is_kept(workers: int) -> None:
    def loader(collate: Callable[[Samples], Any]) -> DataLoader[Any]:
        return DataLoader(Labelled(images(20)), 8, shuffle=True, collate_fn=collate, num_workers=workers)

    with pytest.raises(undrift.DataError, match=r"^the loader's collate_fn reorders.*needed.*Return one row a sample"):
        adapt(small(), loader(by_brightness), Shot(), epochs=1)
    with pytest.warns(undrift.UndriftWarning, match=r"collate_fn reorders.*no agreement") as caught:
        history = adapt(small(), loader(by_brightness), entropy, epochs=2)
    assert [w.filename for w in caught] == [__file__]
    assert history.verdict is not None
    assert history.verdict.agreement is None
    assert adapt(small(), loader(stacked), Shot(), epochs=1).verdict.agreement is not None


def test_a_watched_loader_gives_the_same_run() -> None:
    def noisy(samples: Samples) -> Tensor:
        return torch.stack([x + 0.1 * torch.rand(()) for x, _ in samples])

    class Already(Dataset[Any]):
        def __len__(self) -> int:
            return 20

        def __getitem__(self, i: int) -> Tensor:
            return images(20)[i] + 0.1 * torch.rand(())

    runs = []
    for loader in (DataLoader(Labelled(images(20)), 8, True, collate_fn=noisy), DataLoader(Already(), 8, True)):
        model = small()
        torch.manual_seed(4)
        adapt(model, loader, Shot(), epochs=2)
        runs.append(snapshot(model))
    assert same(*runs)


def test_a_run_that_goes_on_is_watched_and_the_same(tmp_path: Path) -> None:
    left = [0]

    def noisy(samples: Samples) -> Tensor:
        left[0] -= 1
        if left[0] == 0:
            raise OSError("gone")
        return torch.stack([x + 0.1 * torch.rand(()) for x, _ in samples])

    loader = DataLoader(Labelled(images(20)), 5, shuffle=True, collate_fn=noisy)
    whole, model = small(), small()
    torch.manual_seed(4)
    adapt(whole, loader, Shot(), epochs=2)
    taken = -left[0]
    torch.manual_seed(4)
    left[0] = taken - 6  # in the second epoch, before its last batch and its survey
    with pytest.raises(undrift.DataError, match="gone"):
        adapt(model, loader, Shot(), epochs=2, checkpoint=tmp_path / "run")
    adapt(model, loader, Shot(), epochs=2, checkpoint=tmp_path / "run")
    assert same(snapshot(model), snapshot(whole))


class Broken(Dataset[Any]):
    """Files of which one cannot be read."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> Any:
        return None if i == 7 else (images(20)[i], i)


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_that_are_none_may_be_dropped(workers: int) -> None:
    seen: list[tuple[Tensor, Tensor]] = []

    class Recording(Shot):
        def __call__(self, logits: Tensor, step: Step) -> Tensor:
            assert step.indices is not None
            seen.append((step.indices, step.images))
            return super().__call__(logits, step)

    def dropped(samples: Samples) -> Tensor:
        return stacked([sample for sample in samples if sample is not None])

    loader = DataLoader(Broken(), 8, shuffle=True, collate_fn=dropped, num_workers=workers)
    history = adapt(small(), loader, Recording(), epochs=1)
    assert history.surveys[0].samples == 19
    assert sorted(i for places, _ in seen for i in places.tolist()) == [i for i in range(20) if i != 7]
    assert all(torch.equal(batch, images(20)[places]) for places, batch in seen)


def test_other_numbers_of_images_are_said_and_go_on_where_places_do_not_matter() -> None:
    def first_three(samples: Samples) -> Tensor:
        return stacked(samples[:3])

    loader = DataLoader(Labelled(images(20)), 5, collate_fn=first_three)
    with pytest.raises(undrift.DataError, match="made 3 images of 5 samples; needed"):
        adapt(small(), loader, Shot(), epochs=1)
    with pytest.warns(undrift.UndriftWarning, match="made 3 images of 5 samples"):
        history = adapt(small(), loader, entropy, epochs=1)
    assert history.surveys[0].samples == 12


class Halved(DataLoader[Any]):
    """A loader that finishes batches itself."""

    def __iter__(self) -> Iterator[Any]:
        for x in super().__iter__():
            yield x / 2


def test_what_a_loader_with_an_iter_of_its_own_yields_is_used() -> None:
    x = images(20)
    seen: list[Tensor] = []

    def recorded(logits: Tensor, step: Step) -> Tensor:
        seen.append(step.images)
        return entropy(logits)

    adapt(small(), Halved(Labelled(x, "plain"), 10), recorded, epochs=1)
    assert torch.equal(torch.cat(seen), x / 2)
    adapt(small(), Halved(Labelled(x, "plain"), 10), Shot(), epochs=2)
    with pytest.raises(undrift.DataError, match=r"different images.*Halved has its own __iter__, .*plain DataLoader"):
        adapt(small(), Halved(Labelled(x, "plain"), 10, shuffle=True), Shot(), epochs=1)
