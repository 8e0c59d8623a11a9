"""Write checkpoints of source training, and resume from them.

Schedule and randomness are functions of seed and step, so weights, optimiser, best weights and figures are all there is
to save. Written whole or not at all, read with `weights_only`: nothing in a checkpoint is executed.
"""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from undrift._errors import DataError, UndriftWarning
from undrift.images import Domain
from undrift.images.content import checksum
from undrift.system.atomic import sweep, write_bytes
from undrift.system.weights_file import UNREADABLE
from undrift_bench.train.epoch import Epoch, Loop
from undrift_bench.train.options import TrainOptions

VERSION = 1
FREE = ("checkpoint_seconds",)
"""Options that may change between two parts of one run, as no weight depends on them."""
LATER = ("training checksum", "validation checksum")
"""What older checkpoints of this version do not know of their images."""


@dataclass
class Best:
    """The weights that are kept: those of the best validation, or of the last epoch where there is none."""

    epoch: int = 0
    accuracy: float | None = None
    weights: dict[str, Tensor] = field(default_factory=dict)

    def offer(self, figures: Epoch, loop: Loop) -> bool:
        """Take the loop's weights if they are as good as any before; among equals the longer trained are kept."""
        better = figures.accuracy is not None and (self.accuracy is None or figures.accuracy >= self.accuracy)
        last = figures.epoch == loop.options.epochs and self.accuracy is None
        if better or last:
            self.epoch, self.accuracy, self.weights = figures.epoch, figures.accuracy, loop.weights()
        return better or last


def identity(
    options: TrainOptions, network: str, trunk: str, train: Domain, validation: Domain | None
) -> dict[str, Any]:
    """Return what must be the same for two runs to be one: plain values, compared one by one."""
    settings = {key: value for key, value in options.as_dict().items() if key not in FREE}
    return {
        **settings,
        "network": network,
        "trunk": trunk,
        "class_names": list(train.class_names),
        "preprocess": train.preprocess.to_dict(),
        "training images": _describe(train),
        "validation images": "none" if validation is None else _describe(validation),
        "training checksum": checksum(train),
        "validation checksum": "none" if validation is None else checksum(validation),
    }


def save(path: Path, run: Mapping[str, Any], loop: Loop, best: Best, history: list[Epoch]) -> None:
    """Write the checkpoint over the one before."""
    content = {
        "version": VERSION,
        "run": dict(run),
        "network": loop.network.state_dict(),
        "optimiser": loop.optimiser.state_dict(),
        "best": {"epoch": best.epoch, "accuracy": best.accuracy, "weights": best.weights},
        "history": [asdict(row) for row in history],
    }
    # Into memory first: torch.save hides what is wrong with a disk behind an error of its own.
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_bytes(path, buffer.getvalue())


@dataclass
class CheckpointWriter:
    """Writes a run's checkpoints; if one cannot be written, it warns once and training continues."""

    path: Path
    run: Mapping[str, Any]
    loop: Loop
    best: Best
    history: list[Epoch]
    warned: bool = False

    def __call__(self) -> None:
        """Write one, if it can be."""
        try:
            save(self.path, self.run, self.loop, self.best, self.history)
        except DataError as error:
            if not self.warned:
                warnings.warn(
                    f"{self.path}, from which this run goes on if it is stopped, could not be written "
                    f"({error.__cause__ or error}); needed: room on the disk, and the right to write there. Training "
                    "goes on without it, and tries again later: make room meanwhile.",
                    UndriftWarning,
                    stacklevel=4,
                )
            self.warned = True


def restore(path: Path, run: Mapping[str, Any], loop: Loop) -> tuple[Best, list[Epoch]]:
    """Bring the loop to where the checkpoint left it and return the best weights and figures so far."""
    try:
        content: Any = torch.load(path, map_location=loop.device, weights_only=True)
        version, found = content["version"], dict(content["run"])
    except UNREADABLE as error:
        raise DataError(
            f"{path} is not a checkpoint that can be read ({type(error).__name__}); needed: one that `undrift train` "
            "wrote. Delete it, or start over with resume=False."
        ) from error
    if version != VERSION:
        raise DataError(
            f"{path} is a checkpoint of version {version}; needed: version {VERSION}. Finish that run with the undrift "
            "that started it, or start over with resume=False."
        )
    known = {name: value for name, value in run.items() if name in found or name not in LATER}
    if found != known:
        names = sorted(name for name in {*found, *known} if found.get(name) != known.get(name))
        shown = "; ".join(f"{name} was {_short(found.get(name))}, is {_short(run.get(name))}" for name in names[:4])
        raise DataError(
            f"{path} belongs to another run ({shown}); needed: the checkpoint of this one. Call with the old settings "
            "and images to finish that run, write to another file, or start over with resume=False."
        )
    try:
        loop.network.load_state_dict(content["network"], strict=True)
        loop.optimiser.load_state_dict(content["optimiser"])
    except (RuntimeError, ValueError) as error:  # the user's own network: its class is the same, its layers are not
        raise DataError(
            f"{path} was written for other layers than this network has ({str(error).splitlines()[0]}); needed: the "
            "network that the run began with. Pass that one, or start over with resume=False."
        ) from error
    return Best(**content["best"]), [Epoch(**row) for row in content["history"]]


def remove(path: Path) -> None:
    """Delete the checkpoint and what a kill in the middle of writing one may have left."""
    path.unlink(missing_ok=True)
    sweep(path)


def _describe(domain: Domain) -> str:
    assert domain.labels is not None, "checked before"
    digest = hashlib.sha256(domain.labels.cpu().numpy().tobytes()).hexdigest()[:12]
    return f"{len(domain)} of {domain.name} (labels {digest})"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
