"""The results of the demo: numbers by row and seed, findings, and JSON."""

import dataclasses
import json
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from undrift.packs.packing import written_by
from undrift.system import atomic
from undrift_bench.demo import rows, streams
from undrift_bench.demo.domain_file import Filed
from undrift_bench.demo.finding import Gain, gain, headline, sentence
from undrift_bench.demo.rows import DemoRow, Scored
from undrift_bench.demo.setting import DemoSetting
from undrift_bench.demo.streams import Streamed, StreamRow


@dataclass(frozen=True)
class Results:
    """All numbers of one demo.

    Attributes:
        setting: sizes, seeds and rates.
        table: by row, a score a seed.
        streams: by row, a stream a seed.
        file: what came of saving and loading.
        seconds: all in all.
    """

    setting: DemoSetting
    table: dict[str, list[Scored]]
    streams: dict[str, list[Streamed]]
    file: Filed
    seconds: float

    def target(self, row: DemoRow) -> list[tuple[bool, ...]]:
        """Return for each seed which images of the target were answered right."""
        return [s.right for s in self.table[row.name]]

    def along_stream(self, row: StreamRow) -> list[list[bool]]:
        """Return for each seed which images of the stream were answered right, in their order."""
        return [[image for batch in s.right for image in batch] for s in self.streams[row.name]]

    @property
    def gains(self) -> tuple[Gain, Gain, Gain]:
        """What VMP gained on the target: over the source network, over σ = 0, over Tent."""
        vmp = self.target(rows.VMP)
        return (
            gain(vmp, self.target(rows.SOURCE), "the source network"),
            gain(vmp, self.target(rows.CONTROL), "its σ = 0 control"),
            gain(vmp, self.target(rows.TENT), "Tent"),
        )

    @property
    def stream_gains(self) -> tuple[Gain, Gain, Gain]:
        """The same along the stream."""
        vmp = self.along_stream(streams.VMP)
        return (
            gain(vmp, self.along_stream(streams.SOURCE), "the source network"),
            gain(vmp, self.along_stream(streams.CONTROL), "its σ = 0 control"),
            gain(vmp, self.along_stream(streams.TENT), "Tent"),
        )

    @property
    def findings(self) -> list[str]:
        """What may be said, in sentences."""
        batch = gain(self.along_stream(streams.VMP_BATCH), self.along_stream(streams.TENT), "Tent")
        found = [
            sentence("On the scans", *self.gains),
            sentence("Along the stream", *self.stream_gains),
            f"With the statistics of each batch, as Tent has them, VMP {batch} along the stream.",
        ]
        if self.setting.epochs < 2:
            found.append("This was a quick run, for a test: nothing was learned, and its numbers mean nothing.")
        return found

    @property
    def headline(self) -> str:
        """The first of them in one line."""
        before, after = (fmean(s.target.accuracy for s in self.table[row.name]) for row in (rows.SOURCE, rows.VMP))
        return headline(before, after, *self.gains[:2])

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain JSON values."""
        return {
            "undrift": written_by(),
            "machine": {
                "torch": torch.__version__,
                "python": platform.python_version(),
                "cores": os.cpu_count(),
                "seconds": round(self.seconds, 1),
            },
            "setting": dataclasses.asdict(self.setting),
            "table": {name: [_plain(s) for s in seeds] for name, seeds in self.table.items()},
            "streams": {name: [_plain(s) | {"accuracy": s.accuracy} for s in r] for name, r in self.streams.items()},
            "file": self.file.to_dict(),
            "gains": {
                where: [dataclasses.asdict(g) | {"outcome": g.outcome} for g in gains]
                for where, gains in (("target", self.gains), ("stream", self.stream_gains))
            },
            "findings": self.findings,
        }

    def save(self, path: Path) -> int:
        """Write them as JSON, whole or not at all, and return the size."""
        return atomic.write_text(path, json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False))


def _plain(scores: Scored | Streamed) -> dict[str, Any]:
    """Return the numbers without the thousands of right and wrong answers behind them."""
    return {name: value for name, value in dataclasses.asdict(scores).items() if name != "right"}
