"""Score with the user's own metrics: torchmetrics', or any object with update, compute and reset."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from undrift._errors import OptionError
from undrift.system.validate import a_type

Value = float | tuple[float, ...]


class Metric(Protocol):
    """What undrift calls of a metric, as torchmetrics has it."""

    def update(self, preds: Tensor, target: Tensor) -> Any:
        """Take in probabilities and labels of one batch."""

    def compute(self) -> Any:
        """Return the value of all batches: a number, a tensor, or a mapping from names to such."""

    def reset(self) -> Any:
        """Forget all batches."""


class CustomMetrics:
    """Metrics by name; each starts afresh on each domain.

    Args:
        given: metrics by name, or metrics that are called as their classes are.
    """

    def __init__(self, given: Mapping[str, Metric] | Iterable[Metric] = ()) -> None:
        named = given.items() if isinstance(given, Mapping) else ((type(m).__name__, m) for m in _listed(given))
        self._named: dict[str, Metric] = {}
        for name, metric in named:
            _check(name, metric, self._named)
            self._named[name] = metric

    def start(self) -> None:
        """Forget the last domain."""
        for metric in self._named.values():
            metric.reset()

    def add(self, probs: Tensor, labels: Tensor) -> None:
        """Take in one batch; of a network with any number of labels per image, the probability of each label."""
        preds = probs[:, 1] if probs.ndim == 3 else probs
        for metric in self._named.values():
            device = getattr(metric, "device", preds.device)
            metric.update(preds.to(device), labels.to(device))

    def values(self) -> dict[str, Value]:
        """Return the numbers of the batches since the start, by name; a vector is a tuple."""
        found: dict[str, Value] = {}
        for name, metric in self._named.items():
            computed = metric.compute()
            # A MetricCollection has several.
            parts = computed.items() if isinstance(computed, Mapping) else ((name, computed),)
            found.update((str(key), _plain(str(key), value)) for key, value in parts)
        return found


def _listed(given: Any) -> Iterable[Metric]:
    """Return several metrics; one alone is a list of one."""
    if hasattr(given, "update") and hasattr(given, "compute"):
        return (given,)
    return tuple(given)


def _check(name: str, metric: Any, others: Mapping[str, Metric]) -> None:
    if isinstance(metric, type) or not all(callable(getattr(metric, m, None)) for m in ("update", "compute", "reset")):
        raise OptionError(
            f"metric {name!r} is a class or has no update, compute and reset; needed: update(probabilities, labels), "
            "compute() and reset(), as torchmetrics' objects have them. Give such an object."
        )
    if name in others:
        raise OptionError(
            f"two metrics are called {name!r}; needed: names that differ. Give a dict: metrics={{'macro': …, …}}."
        )


def _plain(name: str, value: Any) -> Value:
    """Return a number or numbers that JSON can hold."""
    try:
        numbers = torch.as_tensor(value, dtype=torch.float64).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise OptionError(
            f"metric {name!r} computes {a_type(value)}; needed: a number, or a tensor of them. Leave it out."
        ) from error
    if numbers.ndim > 1:
        raise OptionError(
            f"metric {name!r} computes a tensor of shape {tuple(numbers.shape)}; needed: a number, or one per class. "
            "Ask the metric itself after evaluate: it still holds the last domain."
        )
    if not bool(torch.isfinite(numbers).all()):
        raise OptionError(
            f"metric {name!r} is {numbers.tolist()}; needed: finite numbers. Many metrics are not defined where a "
            "class has no image."
        )
    return float(numbers) if numbers.ndim == 0 else tuple(numbers.tolist())
