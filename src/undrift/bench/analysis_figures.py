"""Pictures of the analyses: lines over values, a bar a trial, and σ per layer against A-distance."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from undrift.bench.store import Record
from undrift.plots import BLUE, COLOURS, GREY, MOST_NAMES, _figure, _save

ALIKE = 1.0  # points of accuracy: with one seed, less is no difference

Panels = Mapping[str, Mapping[str, Mapping[str, float]]]
"""By data set, curve and value: accuracy in per cent."""


def lines(path: Path, title: str, axis: str, panels: Panels) -> int:
    """Draw one panel a data set, one line a curve over evenly spaced values; return the file's size."""
    figure = _figure(path, 1.5 + 4.5 * len(panels), 4.2)
    for axes, (name, curves) in zip(_side_by_side(figure, len(panels)), panels.items(), strict=True):
        values = sorted({value for points in curves.values() for value in points}, key=float)
        for number, (curve, points) in enumerate(curves.items()):
            where = [values.index(value) for value in sorted(points, key=float)]
            heights = [points[values[place]] for place in where]
            axes.plot(where, heights, marker="o", color=COLOURS[number % len(COLOURS)], label=curve)
        axes.set_xticks(range(len(values)), values)
        axes.set(xlabel=axis, ylabel="accuracy %")
        axes.set_title(name, fontsize=10)
        axes.legend(frameon=False, fontsize=8)
    figure.suptitle(f"{title}\n{finding(panels)}", fontsize=11, fontweight="bold")
    return _save(figure, path)


def bars(path: Path, title: str, axis: str, panels: Panels) -> int:
    """Draw one panel a data set, one bar a trial; return the file's size."""
    most = max(len(points) for curves in panels.values() for points in curves.values())
    figure = _figure(path, 1.5 + 4.5 * len(panels), 1.8 + 0.36 * most)
    for axes, (name, curves) in zip(_side_by_side(figure, len(panels)), panels.items(), strict=True):
        points = {value: height for curve in curves.values() for value, height in curve.items()}
        axes.barh(range(len(points)), list(points.values()), 0.7, color=BLUE)
        for place, height in enumerate(points.values()):
            axes.annotate(f"{height:.1f}", (0, place), (3, 0), textcoords="offset points", va="center", color="white")
        axes.set_yticks(range(len(points)), list(points))
        axes.set_ylim(len(points) - 0.4, -0.6)
        axes.set(xlabel="accuracy %", ylabel=axis)
        axes.set_title(name, fontsize=10)
    figure.suptitle(f"{title}\n{finding(panels)}", fontsize=11, fontweight="bold")
    return _save(figure, path, grid="x")


def sigma(path: Path, by_task: Mapping[str, Record]) -> int:
    """Draw Σσ, σ over its kernel's deviation, and A-distance, layer by layer, a line a task; return the file's size."""
    figure = _figure(path, 9.5, 9)
    upper, middle, lower = figure.subplots(3, 1, sharex=True)
    first = next(iter(by_task.values()))
    layers = list(first["sigma"])
    places = range(len(layers))
    for axes, name in ((upper, "start_l1"), (middle, "start_relative")):
        axes.plot(places, _column(first, name), "--", color=GREY, zorder=3, label="before the first step")
    for number, (task, record) in enumerate(by_task.items()):
        colour = COLOURS[number % len(COLOURS)]
        upper.plot(places, _column(record, "l1"), color=colour, label=task)
        middle.plot(places, _column(record, "relative"), color=colour, label=task)
        lower.plot(places, [record["a_distance"][layer] for layer in layers], color=colour, label=task)
    upper.set_ylabel("Σσ (ℓ1, as in the paper)")
    middle.set_ylabel("σ / standard deviation\nof its kernel (mean)")
    lower.set_ylabel("A-distance of the\nsource network")
    lower.set_ylim(0, 2.05)
    step = -(-len(layers) // MOST_NAMES)
    lower.set_xticks(places[::step], layers[::step], rotation=90, fontsize=6)
    for axes in (upper, middle, lower):
        axes.legend(frameon=False, fontsize=8)
    moved = "\n".join(
        f"{task}: rank correlation of A-distance with Σσ {l1:+.2f}, with the change of σ {change:+.2f}"
        for task, record in by_task.items()
        for l1, _, change in (correlations(record),)
    )
    figure.suptitle(f"Does σ grow where the domains differ?\n{moved}", fontsize=10, fontweight="bold")
    return _save(figure, path)


def finding(panels: Panels) -> str:
    """Return, for each data set, the best and the worst value, or that they are alike."""
    words = []
    for name, curves in panels.items():
        points = {
            " ".join(filter(None, (curve, value.partition("\n")[0]))): height
            for curve, found in curves.items()
            for value, height in found.items()
        }
        best, worst = (pick(points, key=lambda point: points[point]) for pick in (max, min))
        if points[best] - points[worst] < ALIKE:
            words.append(f"{name}: all within {points[best] - points[worst]:.1f} points")
            continue
        words.append(f"{name}: best {best} ({points[best]:.1f} %), worst {worst} ({points[worst]:.1f} %)")
    return "\n".join(words)


def correlations(record: Record) -> tuple[float, float, float]:
    """Return Spearman's rank correlation, over layers, of A-distance with Σσ, with σ/std, and with how far σ moved."""
    distances = [record["a_distance"][layer] for layer in record["sigma"]]
    l1, relative, start = (_column(record, name) for name in ("l1", "relative", "start_relative"))
    change = [after / before if before else 0.0 for before, after in zip(start, relative, strict=True)]
    return spearman(distances, l1), spearman(distances, relative), spearman(distances, change)


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the correlation of the ranks, equal values sharing theirs; 0 where one of the two never changes.

    Examples:
        >>> spearman([1, 2, 3], [10, 100, 1000]), spearman([1, 2, 3], [5, 5, 5])
        (1.0, 0.0)
    """
    first, second = _ranks(one), _ranks(other)
    centre = (len(first) - 1) / 2
    products = [sum((a - centre) * (b - centre) for a, b in zip(x, y, strict=True)) for x, y in _pairs(first, second)]
    both, mine, theirs = products
    return both / (mine * theirs) ** 0.5 if mine > 0 and theirs > 0 else 0.0


def _pairs(first: list[float], second: list[float]) -> list[tuple[list[float], list[float]]]:
    return [(first, second), (first, first), (second, second)]


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def _column(record: Record, name: str) -> list[float]:
    return [row[name] for row in record["sigma"].values()]


def _side_by_side(figure: Any, count: int) -> list[Any]:
    return list(figure.subplots(1, count, squeeze=False)[0])
