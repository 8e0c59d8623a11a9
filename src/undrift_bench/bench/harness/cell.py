"""Cells (one method, network, setting and seed) and rows of a table."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from undrift._errors import OptionError
from undrift.options import _suggest
from undrift.recipes.method import Loop

Tier = Literal["A", "B"]
Precision = Literal["bf16", "float32"]

# σ = 0: no layer has noise, so that no log-variance counts as learnable either.
NO_NOISE: dict[str, Any] = {"layers": (), "test_samples": 0}
# σ = 0 where weights are trained: without noises there would be no prior, which has to hold the mean as before.
NO_VARIANCE: dict[str, Any] = {"init_fraction": 0.0}


@dataclass(frozen=True)
class MethodRow:
    """One line of a table.

    Attributes:
        name: short and stable; finished cells and their files are named by it.
        method: a name that `undrift.methods.get` knows.
        settings: what is changed from that method's own values.
        tier: "A" runs with every seed, "B" with the first alone.
        control: whether the row checks another one.
        cost: rough time of a step over Tent's, to guess the time of an unknown cell.
        why: for a control, what it asks.
        title: what tables call it; empty is the name.
        note: a footnote of the tables.
        loop: "stream" or "adapt".
        group: a name that `--only` takes for all rows of a group; without it they do not run.
    """

    name: str
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    tier: Tier = "A"
    control: bool = False
    cost: float = 1.0
    why: str = ""
    title: str = ""
    note: str = ""
    loop: Loop = "stream"
    group: str = ""

    @property
    def label(self) -> str:
        """What tables and figures call it."""
        return self.title or self.name


@dataclass(frozen=True)
class Cell:
    """One run whose result is kept for good.

    Attributes:
        benchmark: such as "online-c10".
        network: the source network's name.
        setting: such as "continual", or a task such as "photo-sketch".
        row: the line of the table it belongs to.
        seed: of the images' order and of the noise.
        images: of each domain; a cell of fewer images is another cell.
        precision: "bf16" (`--fast`, what the tables are made with), or "float32", which the file's name then says.

    Examples:
        >>> Cell("online-c10", "wrn40_2", "continual", MethodRow("tent", "tent"), 0, 10_000).key
        'wrn40_2.continual.tent.n10000.s0'
    """

    benchmark: str
    network: str
    setting: str
    row: MethodRow
    seed: int
    images: int
    precision: Precision = "bf16"

    @property
    def key(self) -> str:
        """A name that is stable between machines and versions, and fit for a file."""
        parts: tuple[str, ...] = (self.network, self.setting, self.row.name, f"n{self.images}", f"s{self.seed}")
        parts += () if self.precision == "bf16" else (self.precision,)  # seeds of both lie side by side, never averaged
        return ".".join(re.sub(r"[^A-Za-z0-9_-]+", "_", part) for part in parts)

    @property
    def identity(self) -> dict[str, Any]:
        """What a finished record has to agree with to be this cell's.

        `resolved` is a hash of the row with every default filled in: if a default changes, the cell is run again.
        """
        from undrift_bench.bench.harness.resolved import fingerprint  # imports every method

        row = self.row
        named = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "row"}
        named |= {"row": row.name, "method": row.method, "settings": dict(row.settings)}
        return named | {"resolved": fingerprint(row.method, row.settings, row.loop)}


def in_order(cells: Iterable[Cell]) -> list[Cell]:
    """Return the cells in the order in which they run: tier A first, and in a tier seed 0 of everything first."""
    return sorted(cells, key=lambda cell: (cell.row.tier, cell.seed))  # stable: the table's own order within


def seeds_of(row: MethodRow, seeds: int) -> range:
    """Return the seeds that a row runs with."""
    return range(seeds if row.tier == "A" else min(seeds, 1))


def chosen(rows: Sequence[MethodRow], only: Sequence[str], tier: str | None) -> list[MethodRow]:
    """Return the rows asked for: of a tier, by name, group or method (with its variant or not; no control).

    A name without a row is an error, as the call would run less than was meant.
    """
    known = list(dict.fromkeys(name for row in rows for name in (row.name, *sorted(_names(row)))))
    for name in only:
        if name not in known:
            raise OptionError(
                f"there is no row or method {name!r} here{_suggest(name, known)}; needed: one of {', '.join(known)}. "
                "Choose among these."
            )
    of_tier = [row for row in rows if tier in (None, row.tier)]
    return [row for row in of_tier if (_names(row) & set(only) if only else not row.group)]


def _names(row: MethodRow) -> set[str]:
    if row.control:
        return {row.name, row.group} - {""}
    return {row.name, row.method, row.method.partition(":")[0]}
