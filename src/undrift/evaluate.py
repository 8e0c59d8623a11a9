"""Measure an adapted network where labels exist: on domains, on source and target, or along a stream of domains."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from undrift._errors import DataError
from undrift.answer.forward import unwrapped
from undrift.answer.prediction import Prediction
from undrift.answer.preprocess_check import warn_of_preprocess
from undrift.images import FileDomain, TensorDomain
from undrift.judge.custom_metrics import CustomMetrics, Metric
from undrift.judge.metrics import Tally
from undrift.judge.report import Report, Result, Role
from undrift.posterior.batch import images_of
from undrift.posterior.kept_statistics import warn_of_mean
from undrift.posterior.perturbed import Perturbed
from undrift.predict import Mode, predict
from undrift.system.validate import a_type
from undrift.system.version import own_version

Loader = Iterable[Any] | FileDomain | TensorDomain
Answer = Callable[[Iterator[Tensor]], Iterable[Prediction]]
Ask = Callable[[Tensor], Prediction]
Watch = Callable[[Tensor, Prediction, Tensor], object]
"""What is called with each batch of target images, its answers and its labels."""
KEYS = ("labels", "label", "targets", "target", "y")


def evaluate(
    model: nn.Module,
    data: Loader | Mapping[str, Loader],
    *,
    metrics: Mapping[str, Metric] | Iterable[Metric] = (),
    samples: int | None = None,
    temperature: float = 1.0,
    generator: torch.Generator | int | None = None,
    mode: Mode = "full",
    watch: Watch | None = None,
) -> Report:
    """Return error, NLL, Brier, ECE, AURC and AUGRC of a network on labelled images: one domain, or several by name.

    This adapts nothing and does not change the network. A plain network can be evaluated too, for comparison.

    Args:
        model: a perturbed network, or any classifier.
        data: a loader of images with labels (tuples or dicts), an `undrift.images` domain, or a mapping from names to
            such.
        metrics: more metrics, such as `[torchmetrics.F1Score("multiclass", num_classes=7)]`, or a mapping from names to
            metrics. Each gets probabilities and the loader's labels, is reset before each domain, and appears in
            `result.metrics` and in the printed table.
        samples: draws to average per prediction; 0 is the mean network. Default: the option `test_samples`.
        temperature: divides the logits.
        generator: a generator or a seed makes the draws reproducible.
        mode: "full" draws, or "fast" (see `undrift.predict`).
        watch: called with each batch of images, its answers and its labels; `undrift.Recording().add` collects the data
            for `Report.page`.

    Examples:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
        >>> report = evaluate(net, [(torch.rand(8, 1, 2, 2), torch.zeros(8, dtype=torch.long))])
        >>> report.results[0].scores.count
        8
    """
    model, named = unwrapped(model), data if isinstance(data, Mapping) else {"target": data}
    warn_of_preprocess(model, *named.values())
    ask = _ask(model, samples, temperature, generator, mode)
    _warn_of_mean(model, samples)
    own = CustomMetrics(metrics)
    results = tuple(_result(name, ask, loader, watch=watch, own=own) for name, loader in named.items())
    if not results:
        raise DataError(
            "no domains were given; needed: a loader, or a mapping from names to loaders. Give at least one."
        )
    return Report("offline", results, _about(model, samples, temperature, mode))


def evaluate_generalized(
    model: nn.Module,
    target: Loader,
    source: Loader,
    *,
    task: str = "source → target",
    samples: int | None = None,
    temperature: float = 1.0,
    generator: torch.Generator | int | None = None,
    mode: Mode = "full",
    watch: Watch | None = None,
) -> Report:
    """Return the scores of an adapted network on its target and on its source, with their harmonic mean.

    The protocol splits the source 80/20, adapts on all of the target, and reports accuracy on the held-out 20 % and
    on the target. `undrift.join` makes one table of many tasks, with the mean of their harmonic means and the
    harmonic mean of their means, which differ.

    Args:
        target: labelled images of the target domain.
        source: labelled images of the source domain that the source network was not trained on.
        task: its name, such as "photo → sketch".
        watch: called with each batch of target images, its answers and its labels.
    """
    model = unwrapped(model)
    warn_of_preprocess(model, target, source)
    ask = _ask(model, samples, temperature, generator, mode)
    _warn_of_mean(model, samples)
    results = (_result("source", ask, source, "source", task), _result("target", ask, target, "target", task, watch))
    return Report("generalized", results, _about(model, samples, temperature, mode))


def evaluate_continual(
    model: nn.Module,
    domains: Mapping[str, Loader],
    answer: Answer,
    *,
    source: Loader | None = None,
    samples: int | None = None,
    temperature: float = 1.0,
    generator: torch.Generator | int | None = None,
    mode: Mode = "full",
    watch: Watch | None = None,
) -> Report:
    """Return the error along a stream of domains, and how much the network forgot of its source.

    The domains follow each other in one stream of images, without a sign where one ends. `answer` gets no labels. Each
    batch is scored by its immediate answer.

    Args:
        model: the network that adapts; it is left adapted.
        domains: labelled loaders by name, in the order of the stream.
        answer: takes batches of images and yields one prediction per batch:
            `lambda images: undrift.stream(model, images, likelihood=undrift.entropy)`.
        source: clean labelled source images, to measure forgetting: before the stream under the source network, after
            it under the adapted one, with `samples` draws.
        samples: draws per prediction on the source images; the stream decides about its own.
        temperature: divides the logits on the source images.
        generator: makes the draws on the source images reproducible.
        watch: called with each batch of the stream, its answers and its labels.
    """
    model, results = unwrapped(model), list[Result]()
    warn_of_preprocess(model, *domains.values(), source)
    ask = _ask(model, samples, temperature, generator, mode)
    if source is not None:
        results.append(_before(model, source, temperature))
    tallies = {name: Tally() for name in domains}
    waiting: deque[tuple[str, Tensor, Tensor]] = deque()
    for number, prediction in enumerate(answer(_images(domains, waiting, watch is not None)), 1):
        if not waiting:
            raise DataError(
                f"answer {number} came without a batch; needed: one prediction per batch. Let `answer` yield once for "
                "each batch of images that it takes."
            )
        name, labels, images = waiting.popleft()
        if len(prediction) != len(labels):
            raise DataError(
                f"answer {number} ({name}) is for {len(prediction)} images, the batch has {len(labels)}; needed: a row "
                "per image. Let `answer` yield one prediction for each batch, in order, the last and short one too."
            )
        tallies[name].add(prediction.probs, labels, prediction.label)
        if watch is not None:
            watch(images, prediction, labels)
    if waiting:
        raise DataError(
            f"{len(waiting)} batches of {waiting[0][0]} got no answer; needed: one prediction per batch. Let `answer` "
            "yield one for each batch, skipped ones too."
        )
    results += [_scored(name, tally) for name, tally in tallies.items()]
    if source is not None:
        _warn_of_mean(model, samples)
        results.append(_result("source", ask, source, "source"))
    return Report("continual", tuple(results), _about(model, samples, temperature, mode))


def labels_of(item: Any) -> Tensor:
    """Return the labels from what a loader yields: the second of a tuple, or a dict's `labels`."""
    found: Any = None
    if isinstance(item, Mapping):
        found = next((item[key] for key in KEYS if key in item), None)
    elif isinstance(item, tuple | list) and len(item) > 1:
        found = item[1]
    if not isinstance(found, Tensor):
        given = f"dicts with {', '.join(map(repr, item))}" if isinstance(item, Mapping) else f"{a_type(item)}"
        raise DataError(
            f"the loader yields {given}, in which no tensor of labels was found; needed: (images, labels), or a dict "
            f"with labels under {', '.join(KEYS)}. Give labels, too; a single batch in a list: [(images, labels)]."
        )
    return found


def _ask(
    model: nn.Module,
    samples: int | None,
    temperature: float,
    generator: torch.Generator | int | None,
    mode: Mode = "full",
) -> Ask:
    """Return what maps images to predictions."""
    if isinstance(generator, int):
        generator = torch.Generator().manual_seed(generator)  # one for all batches: each has its own noise

    def ask(images: Tensor) -> Prediction:
        prediction = predict(model, images, samples, generator=generator, temperature=temperature, mode=mode)
        names, outputs = getattr(model, "classes", None), prediction.probs.shape[1]
        if isinstance(model, Perturbed) and names is not None and len(names) != outputs:
            raise DataError(
                f"the network has {outputs} outputs and {len(names)} class names; needed: one name per output, in "
                "their order. Correct model.classes."
            )
        return prediction

    return ask


def _warn_of_mean(model: nn.Module, samples: int | None) -> None:
    """Warn as `predict` would, but with the caller's line; it warns once per network."""
    if isinstance(model, Perturbed) and (model.options.test_samples if samples is None else samples) == 0:
        warn_of_mean(model)


def _batches(loader: Loader) -> Iterable[Any]:
    """Return the batches of a loader, a domain or a data set."""
    if isinstance(loader, FileDomain | TensorDomain):
        return loader.batches(100)
    if isinstance(loader, Dataset):
        return loader if isinstance(loader, Iterable) else DataLoader(loader, 100)
    if isinstance(loader, str | Tensor) or not isinstance(loader, Iterable):
        raise DataError(
            f"images to evaluate on are {a_type(loader)}; needed: a loader of (images, labels), a list of such "
            "batches, or a mapping from names to loaders. Give a single batch in a list: [(images, labels)]."
        )
    return loader


def _result(
    name: str,
    ask: Ask,
    loader: Loader,
    role: Role = "target",
    task: str = "",
    watch: Watch | None = None,
    own: CustomMetrics | None = None,
) -> Result:
    tally, own = Tally(), own or CustomMetrics()
    own.start()
    for item in _batches(loader):
        # Labels first: a loader without labels should fail before a forward pass.
        labels = labels_of(item)
        prediction = ask(images := images_of(item))
        tally.add(prediction.probs, labels, prediction.label)
        own.add(prediction.probs, labels)
        if watch is not None:
            watch(images, prediction, labels)
    return replace(_scored(name, tally, role, task), metrics=own.values())


def _scored(name: str, tally: Tally, role: Role = "target", task: str = "") -> Result:
    return Result(name, tally.scores(), tally.reliability(), role, task, tally.risks())


def _before(model: nn.Module, source: Loader, temperature: float) -> Result:
    if not isinstance(model, Perturbed):
        return _result("source", _ask(model, None, temperature, None), source, "source before")
    with model.off() as net:
        return _result("source", _ask(net, None, temperature, None), source, "source before")


def _images(
    domains: Mapping[str, Loader], waiting: "deque[tuple[str, Tensor, Tensor]]", keep: bool
) -> Iterator[Tensor]:
    """Yield the images of one domain after the other, and put their labels into `waiting`, hidden from the stream.

    Args:
        keep: put the images there too; without it, none of them, as `answer` may take many batches at once.
    """
    for name, loader in domains.items():
        for item in _batches(loader):
            labels, images = labels_of(item), images_of(item)
            waiting.append((name, labels, images if keep else images[:0]))
            yield images


def _about(model: nn.Module, samples: int | None, temperature: float, mode: Mode) -> dict[str, Any]:
    about: dict[str, Any] = {"undrift": own_version(), "temperature": temperature, "network": type(model).__name__}
    if isinstance(model, Perturbed):
        about["network"] = type(model.net).__name__
        about["mode"] = mode
        about["samples"] = model.options.test_samples if samples is None else samples
        about["options"] = model.options.as_dict()
    return about
