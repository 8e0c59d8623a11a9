"""Draw records: bars with published values, heat maps by domain, lines over a size."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from undrift.judge.plots import BLUE, COLOURS, GREY, ORANGE, _figure, _save


@dataclass(frozen=True)
class BarMark:
    """One bar: a name, its numbers over seeds (in per cent), what was published, and whether it is a control."""

    name: str
    numbers: Sequence[float]
    published: float | None = None
    control: bool = False
    domains: Mapping[str, float] | None = None

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return statistics.fmean(self.numbers)


def overview(path: Path, title: str, marks: Sequence[BarMark], axis: str = "error %") -> int:
    """Draw bars beside a heat map of the domains; return the file's size."""
    domains = list(next((m.domains for m in marks if m.domains), {}))
    height = 1.9 + 0.34 * len(marks)
    figure = _figure(path, 5.5 + 0.52 * len(domains), height + (0.6 if domains else 0))
    if domains:
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(5, 0.52 * len(domains) + 0.5))
        _heat(right, marks, domains)
    else:
        left = figure.subplots()
    _bars(left, marks, axis)
    figure.suptitle(title, fontsize=11, fontweight="bold")
    return _save(figure, path, grid="x")


def lines(path: Path, title: str, curves: Mapping[str, Mapping[float, float]], axes: tuple[str, str]) -> int:
    """Draw one line a method over a size on a logarithmic axis; return the file's size."""
    figure = _figure(path, 7, 4.4)
    plot = figure.subplots()
    for number, (name, points) in enumerate(curves.items()):
        style = "-" if number < len(COLOURS) else "--"
        where = sorted(points)
        plot.plot(
            where, [points[x] for x in where], style, marker="o", color=COLOURS[number % len(COLOURS)], label=name
        )
    plot.set_xscale("log")
    ticks = sorted({x for points in curves.values() for x in points})
    plot.set_xticks(ticks, [f"{x:g}" for x in ticks])
    plot.set_xticks([], minor=True)
    plot.set(xlabel=axes[0], ylabel=axes[1])
    plot.legend(frameon=False, fontsize=8)
    plot.set_title(title, fontsize=10, fontweight="bold")
    return _save(figure, path)


def finding(marks: Sequence[BarMark], what: str, less_is_better: bool = True) -> str:
    """Return which method is best, in words."""
    best = (min if less_is_better else max)(marks, key=lambda mark: mark.mean)
    said = "" if best.published is None else f", published {best.published:.1f} %"
    said += " (one seed)" if len(best.numbers) == 1 else ""
    return f"{what}\n{best.name} {'errs least' if less_is_better else 'is best'}: {best.mean:.1f} %{said}"


def _bars(axes: Any, marks: Sequence[BarMark], axis: str) -> None:
    places = range(len(marks))
    colours = [GREY if mark.control else BLUE for mark in marks]
    spreads = [statistics.stdev(m.numbers) if len(m.numbers) > 1 else 0.0 for m in marks]
    axes.barh(places, [mark.mean for mark in marks], 0.7, xerr=spreads, color=colours, ecolor="black")
    for place, mark in zip(places, marks, strict=True):
        axes.annotate(f"{mark.mean:.1f}", (0, place), (3, 0), textcoords="offset points", va="center", color="white")
    said = [(mark.published, place) for mark, place in zip(marks, places, strict=True) if mark.published is not None]
    if said:
        values, where = zip(*said, strict=True)
        axes.plot(values, where, "D", color=ORANGE, markeredgecolor="black", markersize=6, label="published")
        axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), fontsize=8)
    axes.set_yticks(places, [mark.name for mark in marks])
    axes.set_ylim(len(marks) - 0.4, -0.6)
    axes.set_xlabel(f"{axis} (grey: a control)" if any(mark.control for mark in marks) else axis)


def _heat(axes: Any, marks: Sequence[BarMark], domains: Sequence[str]) -> None:
    values = [[(mark.domains or {}).get(domain, float("nan")) for domain in domains] for mark in marks]
    image = axes.imshow(values, aspect="auto", cmap="viridis_r", zorder=2)
    low, high = image.get_clim()
    for row, numbers in enumerate(values):
        for column, number in enumerate(numbers):
            dark = number > (low + high) / 2
            axes.text(
                column, row, f"{number:.0f}", ha="center", va="center", fontsize=7, color="w" if dark else "k", zorder=3
            )
    axes.set_xticks(range(len(domains)), [d.replace("_", " ") for d in domains], rotation=45, ha="right", fontsize=8)
    axes.tick_params(axis="y", length=0)
