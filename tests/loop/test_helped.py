"""Did adaptation help? What a stream and an adaptation say of it, what that costs, and that it changes nothing."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import undrift
from stream_support import batches, equal, model_of, state_of
from support import convnet, images

CLASSES = 3


def pictures(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return images with one bright channel, and which."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    x = torch.rand(count, CLASSES, 8, 8, generator=generator)
    x[torch.arange(count), labels] += 0.5
    return x, labels


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    """Return a network that knows which channel is bright."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES)
    )
    optimiser = torch.optim.Adam(net.parameters(), 0.02)
    for step in range(60):
        x, labels = pictures(60, step)
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x), labels).backward()
        optimiser.step()
    return net.eval()


@pytest.mark.parametrize("method", ["undrift-light", "tent", "roid", "cotta", None])
def test_a_stream_that_is_asked_goes_on_as_one_that_is_not(method: str | None) -> None:
    def made() -> Any:
        if method is None:
            return undrift.stream(model_of(norm_statistics="moving"), batches(6))
        torch.manual_seed(0)
        seed = torch.Generator().manual_seed(0)
        return undrift.stream(convnet(), batches(6), method=method, generator=seed, stream_lr=0.01)

    asked, other = made(), made()
    assert asked.health is None
    for _ in range(6):
        random = torch.get_rng_state()
        theirs = next(other)
        torch.set_rng_state(random)
        assert equal(next(asked), theirs)
        random = torch.get_rng_state()
        before = state_of(asked.model)
        assert asked.health is not None
        assert torch.equal(random, torch.get_rng_state())
        assert all(torch.equal(before[name], tensor) for name, tensor in state_of(asked.model).items())
    ours, theirs = asked.state_dict()["model"], other.state_dict()["model"]
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_stream_says_that_the_answers_it_gave_were_worse(trained: nn.Module) -> None:
    x, labels = pictures(240, 1000)
    one_class = x[labels.argsort()].split(8)  # batch statistics take away what the class is
    going = undrift.stream(trained, one_class, method="norm-stats")
    wrong = torch.cat([p.label for p in going]) != labels.sort().values
    health = going.health
    going.remove()
    assert health is not None
    assert wrong.float().mean() > 0.4
    assert health.judgement == "hurt"
    assert health.source.value > 0.8
    assert health.adapted.value < 0.7


def test_a_stream_of_the_source_network_neither_helps_nor_hurts(trained: nn.Module) -> None:
    going = undrift.stream(trained, pictures(128, 1000)[0].split(32), method="source")
    list(going)
    health = going.health
    going.remove()
    assert health is not None
    assert (health.gain.value, health.agreement, health.images) == (0, 1, 128)


def test_a_stream_that_answers_without_noise_is_judged_without_it(trained: nn.Module) -> None:
    x, labels = pictures(256, 1000)
    going = undrift.stream(trained, x.split(64), method="undrift-light", init_fraction=30.0, generator=seeded())
    right = torch.cat([p.label for p in going]) == labels
    health = going.health
    going.remove()
    assert health is not None
    assert right.float().mean() > 0.95
    assert health.adapted.value > 0.9


def test_an_adaptation_that_answers_over_views_is_judged_by_those_answers() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Tanh(), nn.Flatten(), nn.Linear(288, CLASSES))
    x = torch.randn(100, 3, 8, 8)
    before = net.eval()(x).argmax(1)
    model = undrift.perturb(net, answer_views="mirror", layers=(), adapt_lr=1e-9)
    history = undrift.adapt(model, x, undrift.entropy, epochs=2)
    alone, over = (undrift.predict(model, x, views=views).label for views in ((), "mirror"))
    assert history.verdict is not None
    assert history.verdict.helping is not None
    assert history.verdict.helping.agreement == pytest.approx(float((over == before).double().mean()))
    assert not torch.equal(alone, over)


class Counting(nn.Module):
    """Says of an image that is its own number the remainder by three."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)

    def forward(self, x: Tensor) -> Tensor:
        said = nn.functional.one_hot(x[:, 0, 0, 0].long() % CLASSES, CLASSES)
        return 5.0 * said + 0 * self.norm(x.flatten(1)).sum(1, keepdim=True)


def test_the_sample_of_a_stream_is_bounded_and_recent() -> None:
    most, every = 256, 4
    net, total, size = Counting(), 4 * 4 * 256, 50
    numbers = torch.arange(total, dtype=torch.float)[:, None, None, None].expand(total, 3, 2, 2)
    going = undrift.stream(net, numbers.split(size), method="source")
    for _ in numbers.split(size):
        next(going)
    seen: list[Tensor] = []
    hook = net.register_forward_pre_hook(lambda _net, args: seen.append(args[0][:, 0, 0, 0]))
    health = going.health
    hook.remove()
    assert health is not None
    assert health.images == most
    places = torch.cat(seen).unique()
    assert len(places) == most
    assert places[0] >= total - every * most - size
    assert health.agreement == 1  # each image is kept with its own answer


@pytest.mark.parametrize(("size", "most"), [(4, 16), (50, 50)])
def test_no_more_images_are_asked_together_than_the_stream_has_shown_to_fit(size: int, most: int) -> None:
    net = Counting()
    going = undrift.stream(net, torch.rand(200, 3, 2, 2).split(size), method="source")
    list(going)
    rows: list[int] = []
    hook = net.register_forward_pre_hook(lambda _net, args: rows.append(len(args[0])))
    assert going.health is not None
    hook.remove()
    assert going.health.images == 200
    assert max(rows) == most


def test_the_sample_of_a_camera_that_changes_its_size_starts_again() -> None:
    going = undrift.stream(convnet(), [images(6), torch.rand(2, 3, 12, 12)], method="source")
    for count in (6, 2):
        next(going)
        assert going.health is not None
        assert going.health.images == count


@pytest.mark.parametrize("epochs", [1, 4])
def test_the_look_at_a_domain_costs_a_part_of_learning_from_it(epochs: int, trained: nn.Module) -> None:
    least, share = 128, 8
    count = 2 * least * share // epochs
    x, _ = pictures(count, 5)
    model = undrift.perturb(trained, answer_views="mirror")
    rows: list[int] = []
    hook = trained.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    undrift.adapt(model, x, undrift.entropy, epochs=epochs)
    hook.remove()
    model.remove()
    steps, surveys = epochs * count, min(3, epochs + 1) * count  # of the source, and after the last two epochs
    assert sum(rows) - steps - surveys == 2 * 2 * (2 * least)  # two networks, two views of an eighth of that


def test_an_adaptation_that_resumes_says_the_same(trained: nn.Module, tmp_path: object) -> None:
    x, _ = pictures(160, 5)

    def verdict() -> object:
        model = undrift.perturb(trained, generator=torch.Generator().manual_seed(0))
        path = f"{tmp_path}/run"
        found = undrift.adapt(
            model, x, undrift.entropy, epochs=2, checkpoint=path, generator=torch.Generator().manual_seed(1)
        )
        model.remove()
        return found.verdict

    assert verdict() == verdict()  # the second has nothing left to do but to look


class Pixels(nn.Module):
    """Answers every pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, CLASSES, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def test_the_images_of_a_network_that_answers_pixels_are_counted() -> None:
    def camera() -> Iterator[Tensor]:
        for seed in range(3):
            yield images(4, seed)

    going = undrift.stream(Pixels(), camera(), method="norm-stats")
    list(going)
    assert going.health is not None
    assert going.health.images == 12
    history = undrift.adapt(undrift.perturb(Pixels()), images(12), undrift.entropy, epochs=1)
    assert history.verdict is not None
    assert history.verdict.helping is not None
    assert history.verdict.helping.images == 12


def test_an_image_may_be_a_row_of_numbers() -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    going = undrift.stream(undrift.perturb(net), [torch.rand(8, 6) for _ in range(2)])
    list(going)
    assert going.health is not None
    assert going.health.views == 1


def test_a_verdict_ends_with_the_estimate() -> None:
    history = undrift.adapt(undrift.perturb(convnet()), images(12), undrift.entropy, epochs=1)
    assert history.verdict is not None
    assert history.verdict.helping is not None
    assert str(history.verdict).splitlines()[-1] == f"{history.verdict.helping}."
