"""Draw the figures of the analyses: accuracy beside NLL, as lines or dots; one row of panels per data set."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from undrift.judge.plots import BLUE, COLOURS, _figure, _save
from undrift_bench.bench.analysis.scores import MEASURES, Curves, Measure, at_least, finding, joined, spaced, window

Panels = Mapping[str, Curves]
"""By data set."""

WIDTH = 10.0  # inches
LETTERS = int(WIDTH * 72 / (0.6 * 10))  # in a line of ten-point text: a letter is about 0.6 of that wide
SHAPES = "osD^vP"
STRIP = 0.075  # of a panel's height: a line of text
PALE, DARK = "#EEEEEE", "#555555"


def lines(path: Path, title: str, axis: str, panels: Panels) -> int:
    """Draw one line a curve, over values on a logarithmic axis where they span it; return the file's size."""
    figure, rows = _rows(path, title, panels, [4.2] * len(panels))
    for row, curves in zip(rows, panels.values(), strict=True):
        places = spaced({value for points in curves.values() for value in points})
        for axes, measure in zip(row.subplots(1, 2), MEASURES, strict=True):
            cut = _draw_curves(axes, curves, places, measure)
            axes.set_xticks(list(places.values()), list(places))
            axes.set(xlabel=f"{axis}\nshaded: beyond this axis" if cut else axis, ylabel=measure.label)
        columns = len(curves) if sum(len(curve) + 8 for curve in curves) <= LETTERS else 2
        names = axes.get_legend_handles_labels()
        row.legend(*names, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    return _save(figure, path)


def dots(path: Path, title: str, panels: Panels) -> int:
    """Draw one dot a trial, on a stem from the first trial's; return the file's size."""
    trials = [
        {name: score for points in curves.values() for name, score in points.items()} for curves in panels.values()
    ]
    figure, rows = _rows(path, title, panels, [1.5 + 0.36 * len(scores) for scores in trials])
    for row, scores in zip(rows, trials, strict=True):
        left, right = row.subplots(1, 2, sharey=True)
        for axes, measure in zip((left, right), MEASURES, strict=True):
            _draw_dots(axes, {name: score[measure.place] for name, score in scores.items()}, measure)
        left.set_yticks(range(len(scores)), list(scores))
        left.set_ylim(len(scores) - 0.4, -0.6)
        right.tick_params(axis="y", length=0)
    return _save(figure, path, grid="x")


def _rows(path: Path, title: str, panels: Panels, heights: Sequence[float]) -> tuple[Any, Sequence[Any]]:
    """Return a figure, and the part of it for each data set under what was found there."""
    figure = _figure(path, WIDTH, 0.4 + sum(heights))
    figure.get_layout_engine().set(wspace=0.06)
    figure.suptitle(f"{title} (one seed)", fontsize=12, fontweight="bold")
    rows = figure.subfigures(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for row, (name, curves) in zip(rows, panels.items(), strict=True):
        said = finding(name, curves)
        found = [said] if len(said) <= LETTERS else said.split("; ")
        row.suptitle("\n".join(textwrap.fill(part, LETTERS) for part in found), fontsize=10)
    return figure, rows


def _draw_curves(axes: Any, curves: Curves, places: Mapping[str, float], measure: Measure) -> bool:
    """Draw one score of each curve; return whether some of it is beyond the axis."""
    low, high = window([score[measure.place] for points in curves.values() for score in points.values()], measure)
    off: dict[float, list[tuple[float, str, str]]] = {}
    for number, (curve, points) in enumerate(curves.items()):
        colour, shape = COLOURS[number % len(COLOURS)], SHAPES[number % len(SHAPES)]
        # Later ones are smaller: where curves lie on one another, those below are seen around those above.
        above = len(curves) - 1 - number
        size = {"markersize": 5 + 2.5 * above, "linewidth": 1.3 + 1.1 * above}
        face = "white" if above else colour
        for label, part in zip((curve, None), joined(points), strict=False):
            heights = [points[value][measure.place] for value in part]
            where = [places[value] for value in part]
            axes.plot(where, heights, color=colour, label=label, marker=shape, markerfacecolor=face, **size)
        for value, score in points.items():
            if not low <= score[measure.place] <= high:
                off.setdefault(places[value], []).append((score[measure.place], colour, shape))
    axes.margins(x=0.18 if off else 0.06)  # for the numbers beyond the axis
    _limit(axes, low, high, off, measure)
    return bool(off)


def _limit(
    axes: Any, low: float, high: float, off: Mapping[float, Sequence[tuple[float, str, str]]], measure: Measure
) -> None:
    """Limit the axis, with a strip at its worse end where the numbers beyond it are written."""
    room = 0.07 * (high - low)
    low, high = low - room, high + room
    axes.set_ylim(low, high)
    if not off:
        return
    tall = STRIP * max(len(numbers) for numbers in off.values())  # of the panel
    deep = (high - low) * tall / (1 - tall)
    ticks = [tick for tick in axes.get_yticks() if low <= tick <= high]  # none in the strip, which has no scale
    axes.set_yticks(ticks)
    edge, end, arrow = (low, low - deep, "↓") if measure.sign > 0 else (high, high + deep, "↑")
    axes.set_ylim(min(low, end), max(high, end))
    axes.axhspan(edge, end, color=PALE, linewidth=0, zorder=2.5)
    for place, numbers in off.items():
        for level, (number, colour, shape) in enumerate(sorted(numbers)[:: measure.sign]):
            height = end + (level + 0.5) * (edge - end) * STRIP / tall
            axes.plot(place, height, shape, color=colour, markersize=5, zorder=3)
            text = f"{arrow} {number:.{measure.digits - 1}f}"
            axes.annotate(text, (place, height), (6, 0), textcoords="offset points", va="center", fontsize=9, zorder=3)


def _draw_dots(axes: Any, numbers: Mapping[str, float], measure: Measure) -> None:
    first, start = next(iter(numbers.items()))
    low, high = min(numbers.values()), max(numbers.values())
    best = measure.best(numbers.values()) if high - low >= measure.alike else None
    low, high = at_least(low, high, measure)
    room = 0.25 * (high - low)  # for the numbers
    axes.set_xlim(low - room, high + room)
    axes.axvspan(start - measure.alike, start + measure.alike, color=PALE, zorder=0)
    axes.axvline(start, color=DARK, linestyle="--", linewidth=1)
    for place, number in enumerate(numbers.values()):
        axes.plot((start, number), (place, place), color=BLUE, linewidth=2)
        axes.plot(number, place, "o", color=BLUE, markersize=8)
        left = number < start
        axes.annotate(
            f"{number:.{measure.digits}f}",
            *((number, place), (-8 if left else 8, 0)),
            textcoords="offset points",
            ha="right" if left else "left",
            va="center",
            fontweight="bold" if number == best else "normal",
        )
    name = first.splitlines()[0]
    within = f"{measure.alike:g}{' point' if measure.unit else ''}"
    axes.set_xlabel(f"{measure.label}\nshaded: within {within} of “{name}”")
