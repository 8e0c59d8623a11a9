"""Judge a network before and after it adapts, by metrics of torchmetrics beside undrift's own.

pip install undrift torchmetrics
"""

from collections.abc import Iterable

import torch
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score

import undrift


def judged(net: torch.nn.Module, loader: Iterable, classes: int, **settings) -> dict[str, dict[str, float]]:
    """Return the numbers of the source network and of the adapted one; adapting reads no label."""
    metrics = MetricCollection({"F1": MulticlassF1Score(classes), "AUROC": MulticlassAUROC(classes)})
    source = undrift.evaluate(net, loader, metrics=metrics)
    history = undrift.adapt(net, loader, **settings)
    adapted = undrift.evaluate(history.model, loader, metrics=metrics)
    history.model.remove()  # the source network again, bit for bit
    print(history.verdict)  # what could be said without labels
    return {
        name: {"error": 1 - report.results[0].scores.accuracy} | dict(report.results[0].metrics)
        for name, report in (("source", source), ("adapted", adapted))
    }
