"""The tables of docs/explanation/speed.md: VMP's step over Tent's beside each bar, and kernel times.

A ratio is taken over some modes of a step. "The fastest" of several is known only if all were measured, so a failed
mode leaves such a ratio unmeasured.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from undrift_bench.bench.harness.limit import ANY, NOT_MEASURED, Limit
from undrift_bench.bench.harness.table import markdown
from undrift_bench.bench.speed.bars import EAGER, QUARTER, RELEASED, floor_over
from undrift_bench.bench.speed.benchmark import CPU, GPU
from undrift_bench.bench.speed.kernels import OURS
from undrift_bench.bench.speed.report import predictions
from undrift_bench.bench.speed.steps import Case

Row = dict[str, Any]
Found = dict[str, Any]
"""What `undrift bench speed` has written: rows and machine of each part."""
Mode = tuple[bool, bool]
"""Compiled or not, with CUDA graphs or not."""
PLAIN, COMPILED, GRAPH, COMPILED_GRAPH = (False, False), (True, False), (False, True), (True, True)
ALL = (PLAIN, COMPILED, GRAPH, COMPILED_GRAPH)


class Steps:
    """What was measured of one network, without the rows that failed.

    Attributes:
        waits: for the device, and copies to the host, in one uncompiled step, by what step it is.
    """

    def __init__(self, found: Found, case: Case, low: bool) -> None:
        self._rows: dict[tuple[str, Mode], Row] = {}
        for row in measured(found, "steps", case, "ms"):
            if row["low"] == low or row["kind"] == "released":  # that one runs as it was released, in float32
                self._rows[row["kind"], (row["compiled"], row.get("graphs", False))] = row
        looked = measured(found, "launches", case, "waits")
        self.waits: dict[str, int] = {row["kind"]: row["waits"] + row.get("copies to host", 0) for row in looked}

    def fastest(self, kind: str, *modes: Mode) -> Row | None:
        """Return the fastest step of these modes, None unless all of them were measured."""
        rows = [self._rows[kind, mode] for mode in modes if (kind, mode) in self._rows]
        return min(rows, key=lambda row: row["ms"]) if len(rows) == len(modes) else None


@dataclass(frozen=True)
class Line:
    """A line of the table: what it says, its number for a network, and the bar (by network where they differ)."""

    title: str
    value: Callable[[Steps], float | None]
    limit: Limit | dict[str, Limit] = ANY
    digits: int = 2

    def cells(self, cases: Sequence[Case], steps: Sequence[Steps]) -> list[str]:
        """Return title, bar, and the number for each network."""
        limits = [self.limit if isinstance(self.limit, Limit) else self.limit.get(c.network, ANY) for c in cases]
        bars = "; ".join(dict.fromkeys(str(limit) for limit in limits if limit != ANY)) or str(ANY)
        shown = [limit.shown(self.value(own), self.digits) for limit, own in zip(limits, steps, strict=True)]
        return [self.title, bars, *shown]


def measured(found: Found, part: str, case: Case, needed: str) -> list[Row]:
    """Return a part's rows of one network and batch that have the number needed."""
    rows = found.get(part, {}).get("rows", ())
    ours = [row for row in rows if (row["case"]["network"], row["case"]["batch"]) == (case.network, case.batch)]
    return [row for row in ours if "error" not in row and row.get(needed) is not None]


def _vmp_over_tent(vmp: Sequence[Mode], tent: Sequence[Mode], of: str = "ms") -> Callable[[Steps], float | None]:
    def ratio(steps: Steps) -> float | None:
        ours, theirs = steps.fastest("vmp", *vmp), steps.fastest("tent", *tent)
        return ours[of] / theirs[of] if ours and theirs and ours.get(of) and theirs.get(of) else None

    return ratio


def _floor(*modes: Mode) -> Callable[[Steps], float | None]:
    def ratio(steps: Steps) -> float | None:
        ours, theirs = steps.fastest("vmp", *modes), steps.fastest("tent", *modes)
        return floor_over(ours, theirs) if ours and theirs else None

    return ratio


def _released(*modes: Mode) -> Callable[[Steps], float | None]:
    def ratio(steps: Steps) -> float | None:
        released, ours = steps.fastest("released", PLAIN), steps.fastest("vmp", *modes)
        return released["ms"] / ours["ms"] if released and ours else None

    return ratio


def _waits_added(steps: Steps) -> float | None:
    return steps.waits["vmp"] - steps.waits["tent"] if {"vmp", "tent"} <= steps.waits.keys() else None


def _redrawn(of: str, saved: str, sign: int) -> Callable[[Steps], float | None]:
    """Return the ratio to Tent if a CPU drew ε again in the backward pass: more time, less memory."""

    def ratio(steps: Steps) -> float | None:
        ours, theirs = steps.fastest("vmp", PLAIN), steps.fastest("tent", PLAIN)
        known = ours and theirs and of in ours and of in theirs and saved in ours
        return (ours[of] + sign * ours[saved]) / theirs[of] if ours and theirs and known else None

    return ratio


RELEASED_LIMITS = {network: Limit(least=bar) for network, bar in RELEASED.items()}
FLOOR = "its floor: bytes to move, or operations to start where they take longer"
GPU_LINES = (
    Line(
        "VMP with CUDA graphs over the faster of Tent compiled or not, without them",
        _vmp_over_tent((GRAPH, COMPILED_GRAPH), (PLAIN, COMPILED)),
        QUARTER,
    ),
    Line("each in its fastest mode, CUDA graphs on both sides (stricter)", _vmp_over_tent(ALL, ALL), QUARTER),
    Line(FLOOR, _floor(*ALL)),
    Line("peak reserved memory of the same, the graphs' pools included", _vmp_over_tent(ALL, ALL, "reserved"), QUARTER),
    Line("compiled, without CUDA graphs on either side", _vmp_over_tent((COMPILED,), (COMPILED,)), QUARTER),
    Line("peak allocated memory of the same", _vmp_over_tent((COMPILED,), (COMPILED,), "peak"), QUARTER),
    Line("uncompiled", _vmp_over_tent((PLAIN,), (PLAIN,)), EAGER),
    Line("uncompiled, one CUDA graph", _vmp_over_tent((GRAPH,), (GRAPH,)), EAGER),
    Line("waits for the GPU, and copies to the host, added", _waits_added, Limit(most=0), digits=0),
    Line("the released formulation over VMP with CUDA graphs", _released(GRAPH, COMPILED_GRAPH), RELEASED_LIMITS),
    Line(
        "the released formulation over VMP without CUDA graphs, compiled or not",
        _released(PLAIN, COMPILED),
        RELEASED_LIMITS,
    ),
)
CPU_LINES = (
    Line("VMP over Tent", _vmp_over_tent((PLAIN,), (PLAIN,)), EAGER),
    Line("its floor: bytes to move", _floor(PLAIN)),
    Line("… if ε were drawn again in the backward pass", _redrawn("ms", "redraw_ms", 1), EAGER),
    Line("memory kept for the backward pass", _vmp_over_tent((PLAIN,), (PLAIN,), "kept")),
    Line("… if ε were drawn again in the backward pass", _redrawn("kept", "redraw_mib", -1)),
    Line("the released formulation over VMP", _released(PLAIN)),
)


def gpu(found: Found) -> str:
    """Return the table of all bars on a GPU, from what is in speed-cuda.json."""
    if not found.get("steps"):
        return "Not measured yet."
    tried = "by" if found["steps"].get("cudnn_benchmark") else "without"
    how = f"{_about(found['steps'])}; channels-last bfloat16, cuDNN's algorithms chosen {tried} trial."
    if found.get("launches") and _about(found["launches"]) != _about(found["steps"]):
        how += f" Waits: {_about(found['launches'])}."
    return _table(found, "time or memory, VMP over Tent", GPU, GPU_LINES, how) + _predictions(found)


def cpu(found: Found) -> str:
    """Return the table of a step on a CPU, from what is in speed-cpu.json."""
    if not found.get("steps"):
        return "Not measured yet."
    how = f"{_about(found['steps'])}; float32."
    return _table(found, "time or memory, uncompiled", CPU, CPU_LINES, how) + _predictions(found)


def _predictions(found: Found) -> str:
    """Return what predictions cost, where that was measured, as another table."""
    return f"\n\n{predictions(found['predict'])}" if found.get("predict", {}).get("rows") else ""


def kernels(found: Found) -> str:
    """Return the table of a compiled step's kernels by kind, Tent → VMP; nothing where that part was not measured."""
    part = found.get("kernels", {})
    if not part.get("rows"):
        return ""
    each = [{row["kind"]: row for row in measured(found, "kernels", case, "kernel_ms")} for case in GPU]
    seen = dict.fromkeys(kind for rows in each for row in rows.values() for kind in row["kernel_ms"])
    known = (*OURS, "compiler", "other")
    kinds = [*(kind for kind in known if kind in seen), *(kind for kind in seen if kind not in known)]
    texts: dict[str, Callable[[Row], str]] = {"all": lambda row: f"{sum(row['kernel_ms'].values()):.2f}"}
    texts |= {kind: partial(_milliseconds, kind) for kind in kinds}
    texts["how many kernels"] = lambda row: str(row["kernels"])
    lines = [[name, *(_arrow(rows, text) for rows in each)] for name, text in texts.items()]
    header = ["milliseconds of a compiled step's kernels, Tent → VMP", *map(title, GPU)]
    return f"{_about(part)}.\n\n{markdown(header, lines)}".rstrip("\n")


def title(case: Case) -> str:
    """Return a network's full name and its batch.

    Examples:
        >>> title(Case("WRN-28", 200, 32)), title(Case("ResNet-50", 64, 224))
        ('WRN-28-10, batch 200', 'ResNet-50, batch 64')
    """
    return f"{case.network}{f'-{case.width}' if case.network.startswith('WRN') else ''}, batch {case.batch}"


def _table(found: Found, corner: str, cases: Sequence[Case], lines: Sequence[Line], how: str) -> str:
    steps = [Steps(found, case, low=cases is GPU) for case in cases]
    header = [corner, "bar", *map(title, cases)]
    return f"{how} Bold: missed.\n\n{markdown(header, [line.cells(cases, steps) for line in lines])}".rstrip("\n")


def _about(part: Found) -> str:
    where = part["machine"]
    return f"{where['hardware']}; torch {where['torch']}; {where['date']}"


def _milliseconds(kind: str, row: Row) -> str:
    return f"{row['kernel_ms'][kind]:.2f}" if kind in row["kernel_ms"] else "–"


def _arrow(rows: dict[str, Row], text: Callable[[Row], str]) -> str:
    tent, vmp = (text(rows[kind]) if kind in rows else NOT_MEASURED for kind in ("tent", "vmp"))
    return NOT_MEASURED if tent == vmp == NOT_MEASURED else f"{tent} → {vmp}"
