"""Plot a training run: loss, accuracies and learning rate by epoch."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from undrift.system.atomic import write_bytes
from undrift_bench.train.epoch import Epoch


def draw_curve(path: Path, history: Sequence[Epoch], title: str) -> Path | None:
    """Write a PNG and return its path; None where matplotlib, which is optional, is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(9, 3.2), layout="constrained")  # no pyplot: it would keep the figure and a window system
    left, right = figure.subplots(1, 2)
    epochs = [row.epoch for row in history]
    left.plot(epochs, [row.loss for row in history], color="tab:red", label="training loss")
    left.set(xlabel="epoch", ylabel="loss")
    rate = left.twinx()
    rate.plot(epochs, [row.lr for row in history], color="tab:grey", linestyle=":", label="learning rate")
    rate.set(ylabel="learning rate")
    left.legend(handles=[*left.lines, *rate.lines], frameon=False)
    right.plot(epochs, [100 * row.train_accuracy for row in history], color="tab:red", label="training, augmented")
    measured = [(row.epoch, 100 * row.accuracy) for row in history if row.accuracy is not None]
    if measured:
        right.plot(*zip(*measured, strict=True), color="tab:blue", marker=".", label="validation")
    right.set(xlabel="epoch", ylabel="accuracy %")
    right.legend(frameon=False, loc="lower right")
    figure.suptitle(title)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    write_bytes(path, buffer.getvalue())
    return path
