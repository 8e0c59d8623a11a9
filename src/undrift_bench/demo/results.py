"""The results of the demo: numbers by row and seed, findings, and JSON."""

import dataclasses
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from undrift.system import atomic
from undrift.system.version import own_version
from undrift_bench.demo.domain_file import Filed
from undrift_bench.demo.finding import Gain, gain, headline, sentence, spread
from undrift_bench.demo.rows import OURS, RIVALS, SOURCE, TWIN, Scored
from undrift_bench.demo.setting import DemoSetting
from undrift_bench.demo.streams import Streamed


@dataclass(frozen=True)
class Results:
    """All numbers of one demo.

    Attributes:
        setting: sizes and seeds.
        table: by row, a score of the whole target for each seed.
        streams: by row, a stream for each seed; none of a row that needs the whole domain.
        file: what came of saving and loading.
        seconds: all in all.
    """

    setting: DemoSetting
    table: dict[str, list[Scored]]
    streams: dict[str, list[Streamed]]
    file: Filed
    seconds: float

    def accuracy(self, name: str, *, online: bool = False) -> list[float]:
        """Return for each seed the accuracy of a row, on the target or along the stream, in per cent."""
        return [100 * fmean(seed) for seed in self._right(name, online=online)]

    def gains(self, *, online: bool = False) -> tuple[Gain, Gain]:
        """Return what undrift gained over its twin without noise, and over the best of the other rows."""
        there = [row.name for row in RIVALS if row.name in (self.streams if online else self.table)]
        best = max(there, key=lambda name: fmean(self.accuracy(name, online=online)))
        ours = self._right(OURS.name, online=online)
        twin, rival = (
            gain(ours, self._right(row, online=online), called)
            for row, called in ((TWIN.name, "its twin without noise"), (best, best))
        )
        return twin, rival

    @property
    def findings(self) -> list[str]:
        """What may be said, in sentences."""
        found = [
            sentence(
                where,
                fmean(self.accuracy(SOURCE.name, online=online)),
                spread(self.accuracy(OURS.name, online=online)),
                *self.gains(online=online),
            )
            for where, online in (("the scans", False), ("the stream", True))
        ]
        if self.setting.epochs is not None:
            found.append("This was a quick run, for a test: nothing was learned, and its numbers mean nothing.")
        return found

    @property
    def headline(self) -> str:
        """The first of them in one line."""
        return headline(*(fmean(self.accuracy(row.name)) for row in (SOURCE, OURS)))

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain JSON values."""
        return {
            "undrift": own_version(),
            "machine": {
                "torch": torch.__version__,
                "python": platform.python_version(),
                "cores": os.cpu_count(),
                "seconds": round(self.seconds, 1),
            },
            "setting": dataclasses.asdict(self.setting),
            "table": {name: [_plain(s) for s in seeds] for name, seeds in self.table.items()},
            "streams": {name: [_plain(s) for s in seeds] for name, seeds in self.streams.items()},
            "file": self.file.to_dict(),
            "gains": {
                where: [dataclasses.asdict(g) | {"outcome": g.outcome} for g in self.gains(online=online)]
                for where, online in (("target", False), ("stream", True))
            },
            "findings": self.findings,
        }

    def save(self, path: Path) -> int:
        """Write them as JSON, whole or not at all, and return the size."""
        return atomic.write_text(path, json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False))

    def _right(self, name: str, *, online: bool) -> list[Sequence[bool]]:
        runs: Sequence[Scored | Streamed] = self.streams[name] if online else self.table[name]
        return [run.right for run in runs]


def _plain(scores: Scored | Streamed) -> dict[str, Any]:
    """Return the numbers without the thousands of right and wrong answers behind them."""
    return {name: value for name, value in dataclasses.asdict(scores).items() if name != "right"}
