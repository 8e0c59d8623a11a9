"""The second table: one stream under one corruption after another, without marks between them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from undrift.answer.prediction import Prediction
from undrift.evaluate import evaluate_continual
from undrift.judge.metrics import Scores
from undrift.likelihood import entropy
from undrift.options import Answer
from undrift.predict import predict
from undrift.stream import stream
from undrift_bench.demo.rows import NO_NOISE, generator, perturbed
from undrift_bench.demo.setting import DemoSetting, World, stream_domains


@dataclass(frozen=True)
class Streamed:
    """How one stream went.

    Attributes:
        domains: the scores of each corruption, by the answers given at once, and of the clean images at the end.
        right: for each batch, in order, and each image of it, whether the answer given at once was right.
        before: the source network on clean images that no stream saw.
        after: the network as the stream left it, on the same.
    """

    domains: dict[str, Scores]
    right: tuple[tuple[bool, ...], ...]
    before: Scores
    after: Scores

    @property
    def accuracy(self) -> list[float]:
        """Accuracy of each batch, in order."""
        return [sum(batch) / len(batch) for batch in self.right]

    @property
    def mean(self) -> float:
        """Mean accuracy over the domains."""
        return sum(s.accuracy for s in self.domains.values()) / len(self.domains)


@dataclass(frozen=True)
class StreamRow:
    """One method.

    Attributes:
        name: what tables call it.
        adapts: whether it is more than the source network.
        changes: to the paper's preset.
        answer: when a batch is answered; None is the preset's.
        seeded: a seed gives the order of the images, so it always changes something.
    """

    name: str
    adapts: bool = True
    changes: Mapping[str, object] = field(default_factory=dict)
    answer: Answer | None = None
    seeded: bool = True

    def run(self, world: World, setting: DemoSetting, seed: int) -> Streamed:
        """Return how the stream of this seed goes; every row gets the same images in the same order."""
        domains, kept = stream_domains(setting, world)
        order = generator(seed)
        # Drawn once: the labels are looked at a second time, batch by batch, when the stream is over.
        passing = {name: list(d.batches(setting.stream_batch_size, generator=order)) for name, d in domains.items()}
        answers: list[Tensor] = []
        with perturbed(world, seed, **self.changes) as model:

            def answer(images: Iterator[Tensor]) -> Iterator[Prediction]:
                if self.adapts:
                    predictions: Iterator[Prediction] = stream(model, images, entropy, answer=self.answer)
                else:
                    predictions = (predict(model, batch, samples=0) for batch in images)
                for prediction in predictions:
                    answers.append(prediction.label)
                    yield prediction

            clean = kept.batches(setting.stream_batch_size)
            found = evaluate_continual(model, passing, answer, source=clean, generator=seed)
        labels = [labels for batches in passing.values() for _, labels in batches]
        return Streamed(
            {r.domain: r.scores for r in found.of("target")},
            tuple(tuple((a == b).tolist()) for a, b in zip(answers, labels, strict=True)),
            found.of("source before")[0].scores,
            found.of("source")[0].scores,
        )


# The source network is one that may change nothing: no noise, no norm statistics but its own.
SOURCE = StreamRow("source network", False, {"norm_statistics": "source", **NO_NOISE})
TENT = StreamRow("Tent", True, {"norm_statistics": "batch", **NO_NOISE}, "before")
CONTROL = StreamRow("VMP, σ = 0", True, NO_NOISE)
VMP = StreamRow("VMP", True)
VMP_BATCH = StreamRow("VMP, batch statistics", True, {"norm_statistics": "batch"})
STREAM_ROWS = (SOURCE, TENT, CONTROL, VMP, VMP_BATCH)
