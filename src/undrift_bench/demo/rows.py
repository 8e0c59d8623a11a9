"""The rows of the first table: each adapts the same network to the same images and scores both domains.

Every row uses only the library. Rows without noise answer with one pass instead of ten draws, which changes nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from undrift.adapt import adapt
from undrift.answer.prediction import Prediction
from undrift.images import TensorDomain
from undrift.judge.metrics import Scores, Tally
from undrift.likelihood import Shot, entropy
from undrift.likelihood.statistics_first import move_statistics
from undrift.options import PAPER
from undrift.perturb import perturb
from undrift.posterior.perturbed import Perturbed
from undrift.predict import predict
from undrift.stream import stream
from undrift_bench.demo.setting import DemoSetting, World

Run = Callable[[World, DemoSetting, int], "Scored"]

NO_NOISE = {"init_fraction": 0.0, "test_samples": 0}
LARGE = 0.1
"""Initial variance of the row with more noise, in kernel variances; the default is 0.01."""


@dataclass(frozen=True)
class Scored:
    """How one run did: on the target, and on source images that it has not seen.

    Attributes:
        right: for each image of the target, whether its answer was right.
    """

    target: Scores
    source: Scores
    right: tuple[bool, ...]


@dataclass(frozen=True)
class DemoRow:
    """One method.

    Attributes:
        name: what tables call it.
        run: gives its scores on target and held-out source for one seed.
        seeded: whether a seed changes anything.
    """

    name: str
    run: Run
    seeded: bool = True


@contextmanager
def perturbed(world: World, seed: int, **changes: object) -> Iterator[Perturbed]:
    """Give the source network perturbed (the paper's preset with changes), and take it all off again."""
    target = world.target
    model = perturb(
        world.net,
        PAPER.replace(**changes),
        generator=generator(seed),
        preprocess=target.preprocess,
        classes=target.class_names,
    )
    try:
        yield model
    finally:
        model.remove()


@contextmanager
def adapted(world: World, setting: DemoSetting, seed: int, **changes: object) -> Iterator[Perturbed]:
    """Give the source network adapted to the target over epochs, with SHOT's likelihood."""
    with perturbed(world, seed, adapt_lr=setting.lr, **changes) as model:
        order = generator(seed)
        adapt(
            model,
            world.target,
            Shot(),
            setting.epochs,
            batch_size=setting.batch_size,
            generator=order,
            progress=False,
        )
        yield model


def generator(seed: int) -> torch.Generator:
    """Return a generator with this seed."""
    return torch.Generator().manual_seed(seed)


def scores(model: torch.nn.Module, world: World, setting: DemoSetting, seed: int) -> Scored:
    """Return how a network does on both domains, nothing adapted any more."""
    target = predict(model, world.target.batches(setting.batch_size), generator=seed)
    return Scored(score(target, world.target), _source(model, world, setting, seed), right(target, world.target))


def score(answers: Prediction, domain: TensorDomain) -> Scores:
    """Return the scores of these answers to the images of a domain."""
    tally = Tally()
    tally.add(answers.probs, labels_of(domain), answers.label)
    return tally.scores()


def right(answers: Prediction, domain: TensorDomain) -> tuple[bool, ...]:
    """Return for each image of the domain whether it was answered right."""
    return tuple((answers.label == labels_of(domain)).tolist())


def labels_of(domain: TensorDomain) -> Tensor:
    """Return the labels, which the demo's domains have."""
    assert domain.labels is not None
    return domain.labels


def _source(model: torch.nn.Module, world: World, setting: DemoSetting, seed: int) -> Scores:
    return score(predict(model, world.held_out.batches(setting.batch_size), generator=seed), world.held_out)


def source_network(world: World, setting: DemoSetting, seed: int) -> Scored:
    """As it was trained."""
    return scores(world.net, world, setting, seed)


def norm_statistics(world: World, setting: DemoSetting, seed: int) -> Scored:
    """Moving norm statistics see the target as often as the rows that learn; nothing is learned."""
    with perturbed(world, seed, norm_affine=False, **NO_NOISE) as model:
        order = generator(seed)
        for _ in range(setting.epochs):
            batches = world.target.batches(setting.batch_size, generator=order)
            # The places of the images are for likelihoods that keep labels; statistics need none.
            move_statistics(model, lambda batches=batches: ((labels, images) for images, labels in batches))  # type: ignore[misc]
        return scores(model, world, setting, seed)


def tent(world: World, setting: DemoSetting, seed: int) -> Scored:
    """Tent: one pass in which each batch is answered by its own statistics, then makes a step down its entropy."""
    with perturbed(world, seed, norm_statistics="batch", **NO_NOISE) as model:
        order = torch.randperm(len(world.target), generator=generator(seed))
        passing = world.target.select(order.tolist())
        answers = Prediction.cat(stream(model, passing.batches(setting.batch_size), entropy, answer="before"))
        by_place = torch.tensor(right(answers, passing))[order.argsort()]
        return Scored(score(answers, passing), _source(model, world, setting, seed), tuple(by_place.tolist()))


def shot(world: World, setting: DemoSetting, seed: int) -> Scored:
    """SHOT: all weights but the classifier's."""
    history = adapt(
        world.net,
        world.target,
        epochs=setting.epochs,
        method="shot",
        batch_size=setting.batch_size,
        generator=generator(seed),
        progress=False,
        adapt_lr=setting.lr,
    )
    assert history.model is not None
    try:
        return scores(history.model, world, setting, seed)
    finally:
        history.model.remove()


def without_noise(world: World, setting: DemoSetting, seed: int) -> Scored:
    """VMP with σ = 0, which is SHOT on norm layers: same rate, same order, no noise."""
    with adapted(world, setting, seed, **NO_NOISE) as model:
        return scores(model, world, setting, seed)


def vmp(world: World, setting: DemoSetting, seed: int) -> Scored:
    """VMP with the paper's preset."""
    with adapted(world, setting, seed) as model:
        return scores(model, world, setting, seed)


def vmp_large(world: World, setting: DemoSetting, seed: int) -> Scored:
    """VMP with ten times the initial variance."""
    with adapted(world, setting, seed, init_fraction=LARGE) as model:
        return scores(model, world, setting, seed)


SOURCE = DemoRow("source network", source_network, seeded=False)
STATISTICS = DemoRow("norm statistics", norm_statistics)
TENT = DemoRow("Tent", tent)
SHOT = DemoRow("SHOT, all weights", shot)
CONTROL = DemoRow("SHOT-BN = VMP, σ = 0", without_noise)
VMP = DemoRow("VMP", vmp)
VMP_LARGE = DemoRow("VMP, variance × 10", vmp_large)
ROWS = (SOURCE, STATISTICS, TENT, SHOT, CONTROL, VMP, VMP_LARGE)
