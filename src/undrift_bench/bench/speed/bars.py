"""The bars of `undrift bench speed`: which ratios, their floors, and their limits.

A memory bar belongs to the same steps as the time above it. Without CUDA graphs it counts the peak of allocated memory;
with them the reserved memory, which includes a graph's pool (undrift_bench.bench.speed.memory).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from undrift_bench.bench.harness.limit import ANY, Limit
from undrift_bench.bench.speed.floor import floor_ms

Row = dict[str, Any]
RELEASED = {"WRN-28": 5.0, "ResNet-50": 3.5}
STARTUP = {"import undrift": Limit(most=3), "perturb a ResNet-50": Limit(most=0.5)}
"""Seconds, on two cores."""
QUARTER, EAGER = Limit(most=1.25), Limit(most=1.6)


@dataclass(frozen=True)
class Compared:
    """A ratio: what of VMP's fastest step is divided by what of Tent's, among which steps, and its bar."""

    what: str
    of: str
    among: Callable[[Row], bool]
    limit: Limit


@dataclass(frozen=True)
class Ratio:
    """A ratio that was found for a network; `floor` is what counting says that it can be at best."""

    network: str
    what: str
    value: float
    limit: Limit
    floor: float | None = None


def plain(row: Row) -> bool:
    """Return whether a step ran uncompiled, without CUDA graphs."""
    return not row["compiled"] and not row.get("graphs")


def _without_graphs(row: Row) -> bool:
    return not row.get("graphs")


COMPILED = (
    Compared("VMP over Tent, each in its fastest mode", "ms", lambda _: True, QUARTER),
    Compared("peak reserved memory of the same, CUDA graphs' pools included", "reserved", lambda _: True, QUARTER),
    Compared("VMP over Tent without CUDA graphs", "ms", _without_graphs, QUARTER),
    Compared("peak allocated memory of the same", "peak", _without_graphs, QUARTER),
)
UNCOMPILED = (
    Compared("VMP over Tent, uncompiled", "ms", plain, EAGER),
    Compared("memory that autograd keeps for the backward pass", "kept", plain, ANY),
    Compared(
        "VMP over Tent, uncompiled, CUDA graphs",
        "ms",
        lambda row: not row["compiled"] and bool(row.get("graphs")),
        EAGER,
    ),
)


def ratios(rows: list[Row]) -> list[Ratio]:
    """Return every ratio that these steps have both sides of."""
    bars = (*(COMPILED if any(row["compiled"] for row in rows) else ()), *UNCOMPILED)
    networks = dict.fromkeys(row["case"]["network"] for row in rows)
    return [ratio for network in networks for ratio in (*_over_tent(rows, network, bars), *_released(rows, network))]


def _over_tent(rows: list[Row], network: str, bars: tuple[Compared, ...]) -> list[Ratio]:
    out = []
    for bar in bars:
        tent, vmp = (fastest([r for r in rows if bar.among(r)], network, kind) for kind in ("tent", "vmp"))
        if tent and vmp and tent.get(bar.of) and vmp.get(bar.of):
            floor = floor_over(vmp, tent) if bar.of == "ms" else None
            out.append(Ratio(network, bar.what, vmp[bar.of] / tent[bar.of], bar.limit, floor))
    return out


def _released(rows: list[Row], network: str) -> list[Ratio]:
    released, limit = fastest(rows, network, "released"), RELEASED.get(network)
    asked = {"released formulation over VMP": [row for row in rows if _without_graphs(row)]}
    if len(asked["released formulation over VMP"]) < len(rows):
        asked = {
            "released formulation over VMP with CUDA graphs": [row for row in rows if row.get("graphs")],
            "released formulation over VMP without CUDA graphs": [row for row in rows if _without_graphs(row)],
        }
    each = [(what, fastest(among, network, "vmp")) for what, among in asked.items()]
    bar = ANY if limit is None else Limit(least=limit)
    return [Ratio(network, what, released["ms"] / vmp["ms"], bar) for what, vmp in each if released and vmp]


def floor_over(vmp: Row, tent: Row) -> float | None:
    """Return the least that VMP's step could take over Tent's, None where it was not counted."""
    extra = floor_ms(vmp)
    return None if extra is None else 1 + extra / float(tent["ms"])


def fastest(rows: list[Row], network: str, kind: str = "tent") -> Row | None:
    """Return the fastest step of a rival, None where none was measured."""
    own = [r for r in rows if r["case"]["network"] == network and r["kind"] == kind and "ms" in r]
    return min(own, key=lambda r: r["ms"], default=None)
