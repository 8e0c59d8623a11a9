"""Write the numbers of a run as TensorBoard events, if requested."""

import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from undrift._errors import UndriftError

if TYPE_CHECKING:
    from undrift.judge.history import History
    from undrift.judge.report import Report

OF_A_STEP = ("loss", "likelihood", "kl", "entropy", "balance", "lr")


class TensorBoardEvents:
    """A folder of TensorBoard events; use it in a `with` block.

    Args:
        folder: made where it is not there. A second run adds a file to it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._writer: Any = summary_writer()(os.fspath(folder))

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Write numbers at a step; those that are not finite are left out."""
        for name, value in values.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, step)

    def history(self, history: "History") -> None:
        """Write each step of an adaptation."""
        for row in history.steps:
            self.scalars({f"adapt/{name}": getattr(row, name) for name in OF_A_STEP}, row.step)

    def report(self, report: "Report") -> None:
        """Write the scores of each domain, at the domain's number."""
        for number, result in enumerate(report.of("target")):
            scores = {name: getattr(result.scores, name) for name in ("error", "nll", "brier", "ece", "aurc")}
            self.scalars({f"evaluate/{name}": value for name, value in scores.items() if value is not None}, number)

    def __enter__(self) -> "TensorBoardEvents":
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()


def summary_writer() -> Any:
    """Return TensorBoard's writer; raise with the way to install it."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UndriftError(
            "tensorboard is not installed; needed to write its events. Install it: python -m pip install "
            '"undrift[tensorboard]".'
        ) from error
    return SummaryWriter
