"""Draw charts as inline SVG that stretches to the width of the page.

The SVG has no text and scales with constant line widths; labels are HTML around it and keep their size. Colours are the
page's CSS variables, so that a chart follows light mode, dark mode and print.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from undrift.judge.page.markup import number, percent, text

Points = Sequence[tuple[float, float]]

FLAGS = 9
"""The latest marks, which have numbered flags."""

CLOSE = 0.03
"""Part of a chart's width within which the second of two flags stands above the first."""

SIZE = 1000
"""Width and height of a chart in its own units."""


@dataclass(frozen=True)
class Axis:
    """One axis of a chart: its range, its ticks with their texts, and what it measures."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...] = ()
    title: str = ""

    def at(self, value: float) -> float:
        """Return where a value is, from 0 to 1; values outside are at the end."""
        span = self.high - self.low
        return min(1.0, max(0.0, (value - self.low) / span)) if span > 0 and math.isfinite(value) else 0.0


@dataclass(frozen=True)
class Mark:
    """Something that happened at one place of a chart."""

    at: float
    what: str
    kind: str = "note"


def shares(low: float = 0.0, high: float = 1.0, title: str = "") -> Axis:
    """Return an axis of per cent with round ticks."""
    ticks = tuple((tick, percent(tick, 0)) for tick in round_ticks(low, high, 4))
    return Axis(low, high, ticks, title)


def numbers(low: float, high: float, title: str = "", most: int = 4) -> Axis:
    """Return an axis of numbers with round ticks."""
    return Axis(low, high, tuple((tick, number(tick)) for tick in round_ticks(low, high, most)), title)


def counts(low: float, high: float, title: str) -> Axis:
    """Return an axis of whole numbers with round ticks."""
    ticks = [tick for tick in round_ticks(low, high, 5) if float(tick).is_integer()]
    return Axis(low, high, tuple((tick, number(tick)) for tick in ticks), title)


def round_ticks(low: float, high: float, most: int = 4) -> list[float]:
    """Return round numbers in a range, about `most` of them.

    Examples:
        >>> round_ticks(0, 1), round_ticks(0, 87)
        ([0.0, 0.25, 0.5, 0.75, 1.0], [0.0, 25.0, 50.0, 75.0])
    """
    span = high - low
    if not math.isfinite(span) or span <= 0:
        return [low] if math.isfinite(low) else []
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next((s * power for s in (1, 2, 2.5, 5, 10) if span / (s * power) <= most + 1e-9), 10 * power)
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]


def spread(values: Iterable[float], *, zero: bool = False, room: float = 0.08) -> tuple[float, float]:
    """Return a range that holds all finite values, with some room; (0, 1) where there are none."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return 0.0, 1.0
    low, high = min(finite), max(finite)
    low = min(low, 0.0) if zero else low
    pad = room * (high - low) or 0.05 * abs(high) or 0.5
    return (low if zero and low == 0 else low - pad), high + pad


def chart(marks: str, x: Axis, y: Axis, about: str, *, over: str = "", height: float = 13) -> str:
    """Return a chart: marks in SVG, with grid, ticks and axis titles.

    Args:
        marks: what `line`, `band`, `bars` and `dots` give.
        about: what a reader who cannot see it is told.
        over: HTML that lies over the plot.
        height: in rem.
    """
    grid = "".join(f'<path class=grid d="M0 {_y(y, t)}H{SIZE}"/>' for t, _ in y.ticks)
    down = "".join(f'<span class=yt style="top:{100 - 100 * y.at(t):.2f}%">{text(s)}</span>' for t, s in y.ticks)
    along = "".join(
        f'<span class="xt{_side(x.at(t))}" style="left:{100 * x.at(t):.2f}%">{text(s)}</span>' for t, s in x.ticks
    )
    titles = f"<div class=ytitle>{text(y.title)}</div>" if y.title else ""
    foot = f"<div class=xtitle>{text(x.title)}</div>" if x.title else ""
    return (
        f'{titles}<div class=plot style="height:{height}rem">'
        f'<svg viewBox="0 0 {SIZE} {SIZE}" preserveAspectRatio=none role=img aria-label="{text(about)}">'
        f"<title>{text(about)}</title>{grid}{marks}</svg>{over}{down}{along}</div>{foot}"
    )


def line(points: Points, x: Axis, y: Axis, kind: str) -> str:
    """Return a line through points; it breaks where a value is not finite, and a lone point is a dot."""
    parts: list[str] = []
    alone: list[str] = []
    for stretch in _stretches(points):
        places = [f"{_x(x, a)} {_y(y, b)}" for a, b in stretch]
        (parts if len(places) > 1 else alone).append("M" + "L".join(places))
    out = f'<path class="line {kind}" d="{"".join(parts)}"/>' if parts else ""
    return out + "".join(f'<path class="dot {kind}" d="{place}h0"/>' for place in alone)


def dots(points: Points, x: Axis, y: Axis, kind: str, names: Sequence[str] = ()) -> str:
    """Return dots, each with its name where the pointer rests on it."""
    out = []
    for i, (a, b) in enumerate(points):
        if math.isfinite(a) and math.isfinite(b):
            name = f"<title>{text(names[i])}</title>" if names else ""
            out.append(f'<path class="dot {kind}" d="M{_x(x, a)} {_y(y, b)}h0">{name}</path>')
    return "".join(out)


def band(lower: Points, upper: Points, x: Axis, y: Axis, kind: str) -> str:
    """Return the area between two lines over the same places; it breaks where either is not finite."""
    both = [(a, low, high) for (a, low), (_, high) in zip(lower, upper, strict=True)]
    out, stretch = [], []
    for a, low, high in [*both, (math.nan, 0.0, 0.0)]:
        if all(map(math.isfinite, (a, low, high))):
            stretch.append((a, low, high))
            continue
        if len(stretch) > 1:
            there = [f"{_x(x, p)} {_y(y, high)}" for p, _, high in stretch]
            back = [f"{_x(x, p)} {_y(y, low)}" for p, low, _ in reversed(stretch)]
            out.append("M" + "L".join([*there, *back]) + "Z")
        stretch = []
    return f'<path class="band {kind}" d="{"".join(out)}"/>' if out else ""


def bars(heights: Sequence[float], y: Axis, kind: str, names: Sequence[str] = ()) -> str:
    """Return bars of equal width from the axis up, side by side over the whole width."""
    width = SIZE / max(1, len(heights))
    out = []
    for i, value in enumerate(heights):
        if math.isfinite(value) and value > 0:
            top = _y(y, value)
            name = f"<title>{text(names[i])}</title>" if names else ""
            place = f'x="{i * width + 0.06 * width:.1f}" y="{top}" width="{0.88 * width:.1f}"'
            out.append(f'<rect class="bar {kind}" {place} height="{SIZE - float(top):.1f}">{name}</rect>')
    return "".join(out)


def steps(heights: Sequence[float], y: Axis, kind: str) -> str:
    """Return the outline of a histogram."""
    width = SIZE / max(1, len(heights))
    path = f"M0 {SIZE}" + "".join(
        f"L{i * width:.1f} {_y(y, v)}L{(i + 1) * width:.1f} {_y(y, v)}" for i, v in enumerate(heights)
    )
    return f'<path class="line {kind}" d="{path}L{SIZE} {SIZE}"/>' if heights else ""


def diagonal(x: Axis, y: Axis) -> str:
    """Return the line on which both axes are equal."""
    return f'<path class="line even" d="M{_x(x, x.low)} {_y(y, x.low)}L{_x(x, x.high)} {_y(y, x.high)}"/>'


def marked(marks: Sequence[Mark], x: Axis) -> tuple[str, str]:
    """Return marks as dashed lines of a chart, and numbered flags over the last few of them."""
    here = [mark for mark in marks if x.low <= mark.at <= x.high]
    lines = "".join(
        f'<path class="mark {mark.kind}" d="M{_x(x, mark.at)} 0V{SIZE}"><title>{text(mark.what)}</title></path>'
        for mark in here
    )
    flags, before, high = "", -1.0, False
    for i, mark in enumerate(here[-FLAGS:], 1):
        place = x.at(mark.at)
        high = place - before < CLOSE and not high
        style = f"left:{100 * place:.2f}%" + ";top:-1.8rem" * high
        flags += f'<span class="flag {mark.kind}" style="{style}" title="{text(mark.what)}">{i}</span>'
        before = place
    return lines, flags


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Return the names of what a chart shows, each with its colour."""
    return (
        "<p class=legend>" + "".join(f'<span class="key {kind}">{text(name)}</span>' for kind, name in entries) + "</p>"
    )


def rows_of_bars(rows: Sequence[tuple[str, Sequence[tuple[str, float, str]]]], high: float) -> str:
    """Return horizontal bars: for each row a name, and bars of a kind, a length and a text."""
    out = []
    for name, parts in rows:
        inner = "".join(
            f'<span class="hbar {kind}"><i style="width:{_share(value, high):.2f}%"></i><b>{text(shown)}</b></span>'
            for kind, value, shown in parts
        )
        out.append(
            f'<div class=hrow><span class=hname title="{text(name)}">{text(name)}</span><div>{inner}</div></div>'
        )
    return f"<div class=hbars>{''.join(out)}</div>" if out else ""


def _share(value: float, high: float) -> float:
    return min(100.0, max(0.0, 80 * value / high)) if high > 0 and math.isfinite(value) else 0.0


def _stretches(points: Points) -> list[list[tuple[float, float]]]:
    out: list[list[tuple[float, float]]] = [[]]
    for a, b in points:
        if math.isfinite(a) and math.isfinite(b):
            out[-1].append((a, b))
        elif out[-1]:
            out.append([])
    return [stretch for stretch in out if stretch]


def _x(axis: Axis, value: float) -> str:
    return f"{SIZE * axis.at(value):.1f}"


def _y(axis: Axis, value: float) -> str:
    return f"{SIZE - SIZE * axis.at(value):.1f}"


def _side(place: float) -> str:
    return " first" if place < 0.04 else " last" if place > 0.96 else ""
