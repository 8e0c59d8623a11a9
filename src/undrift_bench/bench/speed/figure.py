"""Draw the figure of `undrift bench speed`: one column per size, milliseconds above, memory below."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from undrift.judge.plots import BLUE, GREY, ORANGE, _figure, _save
from undrift_bench.bench.speed.bars import Row
from undrift_bench.bench.speed.growth import KINDS, meaning, memory

COLOURS = {"tent": GREY, "vmp": BLUE, "fine-tune": ORANGE}


def figure(path: Path, found: dict[str, Any]) -> int:
    """Draw time and memory over each size, a panel each; return the file's size."""
    rows: list[Row] = found["growth"]["rows"]
    axes = list(dict.fromkeys(row["axis"] for row in rows))
    numbers: dict[str, Callable[[Row], float | None]] = {"ms a step": lambda row: row["ms"]}
    if what := meaning(rows):
        numbers[f"MiB {what}"] = memory
    picture = _figure(path, 2.9 * len(axes), 0.6 + 2.8 * len(numbers))
    panels = picture.subplots(len(numbers), len(axes), squeeze=False, sharex="col")
    for line, (label, number) in zip(panels, numbers.items(), strict=True):
        for plot, axis in zip(line, axes, strict=True):
            _curves(plot, [row for row in rows if row["axis"] == axis], number)
        line[0].set_ylabel(label)
    for plot, axis in zip(panels[-1], axes, strict=True):
        plot.set_xlabel(axis)
    panels[0][0].legend(frameon=False, fontsize=8)
    picture.suptitle("What a step costs over batch, image, width, draws and classes", fontsize=11, fontweight="bold")
    return _save(picture, path)


def _curves(plot: Any, rows: list[Row], number: Callable[[Row], float | None]) -> None:
    for kind, name in KINDS.items():
        own = sorted((row["size"], value) for row in rows if row["kind"] == kind and (value := number(row)) is not None)
        width = 4 if kind == "tent" else 1.5  # seen beneath VMP's, which lies on it in memory
        where, values = [size for size, _ in own], [value for _, value in own]
        plot.plot(where, values, marker="o", color=COLOURS[kind], linewidth=width, label=name)
    plot.set_xscale("log", base=2)
    plot.set_yscale("log")
    sizes = sorted({row["size"] for row in rows})
    plot.set_xticks(sizes, [f"{size:,}" for size in sizes])
    plot.set_xticks([], minor=True)
    low, high = plot.get_ylim()
    ticks = [m * 10**power for power in range(6) for m in (1, 1.5, 2, 3, 5, 8) if low <= m * 10**power <= high]
    plot.set_yticks(ticks, [f"{tick:,.0f}" for tick in ticks])
    plot.set_yticks([], minor=True)
