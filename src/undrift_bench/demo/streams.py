"""The stream: one corruption after another, without marks between them."""

from dataclasses import dataclass
from typing import Any

import torch

from undrift.judge.metrics import Scores, Tally
from undrift.stream import stream
from undrift_bench.demo.rows import DemoRow, seeded
from undrift_bench.demo.setting import DemoSetting, World, stream_domains


@dataclass(frozen=True)
class Streamed:
    """How one stream went.

    Attributes:
        whole: the scores of all answers, each given at once.
        domains: those of each corruption, and of the clean images at the end.
        right: for each image, in order, whether its answer was right.
        report: what the stream said of itself.
    """

    whole: Scores
    domains: dict[str, Scores]
    right: tuple[bool, ...]
    report: str


def run_stream(row: DemoRow, world: World, setting: DemoSetting, seed: int) -> Streamed:
    """Return how the stream of this seed goes; every row gets the same images in the same order."""
    arguments: dict[str, Any] = dict(row.stream or {})
    order = torch.Generator().manual_seed(seed)
    passing = [
        (name, images, labels)
        for name, domain in stream_domains(setting, world).items()
        for images, labels in domain.batches(setting.stream_batch_size, generator=order)
    ]
    whole, domains, right = Tally(), dict[str, Tally](), list[bool]()
    with seeded(seed) as generator:
        answers = stream(world.net, [images for _, images, _ in passing], generator=generator, **arguments)
        try:
            for p, (name, _, labels) in zip(answers, passing, strict=True):
                for tally in (whole, domains.setdefault(name, Tally())):
                    tally.add(p.probs, labels, p.label)
                right += (p.label == labels).tolist()
        finally:
            answers.remove()
    return Streamed(whole.scores(), {n: t.scores() for n, t in domains.items()}, tuple(right), str(answers.report))
