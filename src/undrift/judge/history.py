"""The record of an adaptation, step by step: prints as a table, saves as JSON, plots."""

import dataclasses
import json
import os
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from torch import Tensor

from undrift._errors import DataError, OptionError, UndriftError
from undrift.judge.verdict import Survey, Verdict
from undrift.posterior.perturbed import Perturbed
from undrift.system import atomic
from undrift.system.warning import warn

PLOTTED = ("loss", "kl", "entropy", "balance")


@dataclass(frozen=True)
class HistoryRow:
    """The numbers of one step, or their means over an epoch.

    Attributes:
        epoch: counted from 1.
        step: counted from 1 over all epochs; the last one of an epoch.
        loss: likelihood + kl.
        likelihood: the likelihood's loss, a mean over images and draws.
        kl: the KL as the objective adds it.
        entropy: mean entropy of the noisy predictions, in nats.
        balance: entropy of the batch's mean prediction over ln(classes): 1 is balanced, 0 is one class.
        lr: learning rate of norm affine parameters; the last one of an epoch.
    """

    epoch: int
    step: int
    loss: float
    likelihood: float
    kl: float
    entropy: float
    balance: float
    lr: float


@dataclass(frozen=True)
class History:
    """What `adapt` returns; `print(history)` is a table.

    Attributes:
        steps: one row per step.
        surveys: one pass over the domain after each epoch, by epoch; 0 is the source network.
        verdict: the label-free verdict; None while the run is not finished.
        kept_epoch: the epoch whose state the model has; 0 is the source network.
        bad_images: indices of images with NaN or infinity, which were skipped.
        bad_steps: steps left out because loss or gradient was not finite.
        lone_batches: batches of one image that were left out.
        idle_steps: steps left out because the likelihood returned None for their batch.
        model: the network that was adapted; not part of what is saved.
        views: with `answer_views="auto"`, the views that passed the test, over which `predict` averages; else None.
        processes: how many adapted it together; `exchanged`: the bytes that each gave to the others per step.
        note: what the method did otherwise because of the network, as sentences; "" if nothing.
    """

    steps: tuple[HistoryRow, ...] = ()
    surveys: dict[int, Survey] = dataclasses.field(default_factory=dict)
    verdict: Verdict | None = None
    kept_epoch: int = 0
    bad_images: tuple[int, ...] = ()
    bad_steps: int = 0
    lone_batches: int = 0
    idle_steps: int = 0
    model: Perturbed | None = dataclasses.field(default=None, compare=False, repr=False)
    views: tuple[str, ...] | None = None
    processes: int = dataclasses.field(default=1, compare=False)
    exchanged: int = dataclasses.field(default=0, compare=False)
    note: str = ""

    @property
    def epochs(self) -> tuple[HistoryRow, ...]:
        """The means of each epoch's steps."""
        return tuple(_mean(list(rows)) for _, rows in groupby(self.steps, key=lambda row: row.epoch))

    @property
    def kept(self) -> str:
        """What the model has, in words: the state of an epoch, or the source network."""
        return f"epoch {self.kept_epoch}" if self.kept_epoch or not self.steps else "source network"

    def __str__(self) -> str:
        names = [f.name for f in dataclasses.fields(HistoryRow)]
        lines = ["".join(f"{name:>11}" for name in names)]
        lines += ["".join(_cell(getattr(row, name)) for name in names) for row in self.epochs]
        if self.bad_images:
            count = _counted(len(self.bad_images), "image")
            lines.append(f"{count} with NaN or infinity skipped: {places(self.bad_images)}")
        if self.bad_steps:
            lines.append(f"{_counted(self.bad_steps, 'step')} not made: loss or gradient was not finite")
        if self.lone_batches:
            lines.append(f"{self.lone_batches} batches of one image left out")
        if self.idle_steps:
            lines.append(f"{_counted(self.idle_steps, 'step')} not made: nothing was asked of their batch")
        if self.views is not None:
            lines.append(f"views found safe: {', '.join(self.views) or 'none'}")
        if self.note:
            lines.append(self.note)
        if self.processes > 1:
            lines.append(f"{self.processes} processes, {self.exchanged:,} bytes exchanged per process and step")
        if self.verdict is not None:
            lines.append(f"{self.kept} kept; {self.verdict}")
        return "\n".join(lines)

    __repr__ = __str__  # what a notebook shows

    def warn(self) -> None:
        """Warn of skipped images, steps that were left out, and a collapse."""
        found = []
        if self.bad_images:
            found.append(
                f"{_counted(len(self.bad_images), 'image')} with NaN or infinity skipped (at "
                f"{places(self.bad_images)}). Correct them, or leave them out: history.bad_images."
            )
        if self.bad_steps:
            found.append(
                f"{_counted(self.bad_steps, 'step')} not made, because loss or gradient was not finite. Lower the "
                "learning rate: adapt_lr=…"
            )
        if found:
            warn(" ".join(found))
        if self.idle_steps and not self.steps:
            warn(
                self.note
                or f"the likelihood asked nothing of any of {self.idle_steps} batches, so no step was made; it has to "
                "return a number for some. Look at its thresholds."
            )
        if self.verdict is not None:
            self.verdict.warn()

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain JSON values."""
        plain = dataclasses.asdict(dataclasses.replace(self, model=None))
        plain.pop("model")
        plain["epochs"] = [dataclasses.asdict(row) for row in self.epochs]
        plain["verdict"] = None if self.verdict is None else self.verdict.as_dict()
        return plain

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON, whole or not at all."""
        atomic.write_text(path, json.dumps(self.as_dict(), indent=1, allow_nan=False))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "History":
        """Return what `save` wrote."""
        try:
            plain = json.loads(Path(path).read_text())
            plain.pop("epochs")
            return cls.from_dict(plain)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{path} is not a history ({error}); needed: JSON as History.save writes it. Check the path."
            ) from error

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> "History":
        """Return the history with these values (`as_dict` without its epochs, which follow from the steps)."""
        verdict = plain["verdict"]
        return cls(
            steps=tuple(HistoryRow(**row) for row in plain["steps"]),
            surveys={int(epoch): Survey(**values) for epoch, values in plain["surveys"].items()},
            verdict=verdict and Verdict.from_dict(verdict),
            kept_epoch=plain["kept_epoch"],
            bad_images=tuple(plain["bad_images"]),
            bad_steps=plain["bad_steps"],
            lone_batches=plain["lone_batches"],
            idle_steps=plain.get("idle_steps", 0),  # missing in older files
            views=None if plain.get("views") is None else tuple(plain["views"]),  # missing in older files
            processes=plain.get("processes", 1),
            exchanged=plain.get("exchanged", 0),
            note=plain.get("note", ""),
        )

    def page(
        self, path: str | os.PathLike[str], images: Any = None, *, labels: Tensor | None = None, most: int = 1000
    ) -> int:
        """Write an HTML page about the adaptation, whole or not at all, and return its size in bytes.

        With `images`, the page compares the answers of the network and of its source on some of them.

        Args:
            images: a tensor, a domain of `undrift.images`, or an iterable of batches: best those that were adapted to.
            labels: their classes, in order, for the page alone.
            most: use at most so many images, spread evenly over a tensor or a domain.
        """
        from undrift.judge.page.compare import compare
        from undrift.judge.page.document import write
        from undrift.judge.page.pages import of_history

        atomic.check(path)
        if images is None:
            return write(path, of_history(self))
        if self.model is None:
            raise OptionError(
                "images were given and this history has no model, as it was loaded from a file; needed: the network "
                "that was adapted. Leave images out, or take the page from what adapt returned."
            )
        return write(path, of_history(self, *compare(self.model, images, labels, most)))

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw loss, KL, entropy and class balance over the steps into an image file (PNG, SVG, PDF by its ending)."""
        try:
            from matplotlib.figure import Figure  # a Figure of its own leaves the user's pyplot alone
        except ImportError as error:
            raise UndriftError(
                "matplotlib is not installed; plot needs it. Install it: pip install 'undrift[plot]'."
            ) from error
        figure, ending = Figure(figsize=(10, 2.6), layout="constrained"), Path(path).suffix.lstrip(".").lower() or "png"
        if ending not in (known := figure.canvas.get_supported_filetypes()):
            raise OptionError(
                f"{path} ends in .{ending}, which is no kind of picture that matplotlib writes; needed: one of "
                f"{', '.join(sorted(known))}. Name it {Path(path).stem}.png."
            )
        for axes, name in zip(figure.subplots(1, len(PLOTTED)), PLOTTED, strict=True):
            axes.plot([r.step for r in self.steps], [getattr(r, name) for r in self.steps], lw=0.6, alpha=0.4)
            axes.plot([r.step for r in self.epochs], [getattr(r, name) for r in self.epochs], marker=".", color="C0")
            axes.set(title=name, xlabel="step")
        with atomic.writing(path) as file:
            figure.savefig(file, format=ending, dpi=150)


def places(indices: tuple[int, ...], few: int = 10) -> str:
    """Return the first places by number, and how many more there are."""
    more = f" and {len(indices) - few} more" if len(indices) > few else ""
    return ", ".join(map(str, indices[:few])) + more


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _mean(rows: list[HistoryRow]) -> HistoryRow:
    names = ("loss", "likelihood", "kl", "entropy", "balance")
    means = {name: sum(getattr(row, name) for row in rows) / len(rows) for name in names}
    return HistoryRow(epoch=rows[-1].epoch, step=rows[-1].step, lr=rows[-1].lr, **means)


def _cell(value: float) -> str:
    return f"{value:>11}" if isinstance(value, int) else f"{value:>11.4g}"
