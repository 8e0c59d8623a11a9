"""What the demo compares: each row is the arguments of `undrift.adapt` and `undrift.stream`, and nothing else.

Every method runs with its authors' values, and `undrift` with no arguments: what a user gets who names nothing.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from undrift.adapt import adapt
from undrift.answer.prediction import Prediction
from undrift.images import TensorDomain
from undrift.judge.history import History
from undrift.judge.metrics import Scores, Tally
from undrift.predict import predict
from undrift_bench.bench.harness.cell import NO_VARIANCE
from undrift_bench.demo.setting import DemoSetting, World


@dataclass(frozen=True)
class DemoRow:
    """One method.

    Attributes:
        name: what tables call it.
        adapt: arguments of `undrift.adapt`, beside network and images.
        stream: arguments of `undrift.stream`; None for a method that needs the whole domain.
    """

    name: str
    adapt: Mapping[str, Any]
    stream: Mapping[str, Any] | None

    def of(self, setting: DemoSetting) -> dict[str, Any]:
        """Return the arguments of `undrift.adapt`; a quick run shortens everything that takes several epochs."""
        return dict(self.adapt) if setting.epochs is None else {**self.adapt, "epochs": setting.epochs}


SOURCE = DemoRow("source network", {"method": "source"}, {"method": "source"})
STATISTICS = DemoRow("norm statistics", {"method": "norm-stats:domain"}, {"method": "norm-stats"})
TENT = DemoRow("Tent", {"method": "tent"}, {"method": "tent"})
# Its authors' rate for digit networks, which train from scratch; the library's 1e-3 is theirs for pretrained backbones.
SHOT = DemoRow("SHOT, all weights", {"method": "shot", "adapt_lr": 1e-2}, None)
VMP = DemoRow("the paper's VMP", {"method": "vmp-shot:paper"}, {"method": "vmp:paper"})
TWIN = DemoRow("undrift without noise", NO_VARIANCE, NO_VARIANCE)
OURS = DemoRow("undrift", {}, {})
ROWS = (SOURCE, STATISTICS, TENT, SHOT, VMP, TWIN, OURS)
RIVALS = (STATISTICS, TENT, SHOT, VMP)


@dataclass(frozen=True)
class Scored:
    """How one run did: on the target, and on source images that it has not seen.

    Attributes:
        right: for each image of the target, whether its answer was right.
        verdict: what the run said of itself without labels.
        views: the views that passed the test without labels; None where none was asked for.
    """

    target: Scores
    source: Scores
    right: tuple[bool, ...]
    verdict: str
    views: tuple[str, ...] | None


@contextmanager
def seeded(seed: int) -> Iterator[torch.Generator]:
    """Give a generator with this seed; torch's global one has it, too, until the block ends."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield torch.Generator().manual_seed(seed)


@contextmanager
def adapted(row: DemoRow, world: World, setting: DemoSetting, seed: int) -> Iterator[History]:
    """Adapt the source network to the target as a row does, and take it all off again."""
    target = world.target
    with seeded(seed) as generator:
        history = adapt(
            world.net,
            target,
            generator=generator,
            preprocess=target.preprocess,
            classes=target.class_names,
            progress=False,
            **row.of(setting),
        )
    assert history.model is not None
    try:
        yield history
    finally:
        history.model.remove()


def run(row: DemoRow, world: World, setting: DemoSetting, seed: int) -> Scored:
    """Return how a row does on the whole target."""
    with adapted(row, world, setting, seed) as history:
        return scored(history, world, setting, seed)


def scored(history: History, world: World, setting: DemoSetting, seed: int) -> Scored:
    """Return how an adapted network does on both domains."""
    assert history.model is not None
    target, source = (
        predict(history.model, domain.batches(setting.answer_batch_size), generator=seed)
        for domain in (world.target, world.held_out)
    )
    return Scored(
        score(target, world.target),
        score(source, world.held_out),
        tuple((target.label == labels_of(world.target)).tolist()),
        str(history.verdict),
        history.views,
    )


def score(answers: Prediction, domain: TensorDomain) -> Scores:
    """Return the scores of these answers to the images of a domain."""
    tally = Tally()
    tally.add(answers.probs, labels_of(domain), answers.label)
    return tally.scores()


def labels_of(domain: TensorDomain) -> torch.Tensor:
    """Return the labels of a domain that has some."""
    assert domain.labels is not None
    return domain.labels
