"""Choose what a figure of an analysis says and shows: the best trial, axis limits, labels."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Score(NamedTuple):
    """What a trial scored: accuracy in per cent, and the negative log-likelihood of the labels."""

    accuracy: float
    nll: float


Curves = Mapping[str, Mapping[str, Score]]
"""By curve ("" where there is one alone) and value."""


@dataclass(frozen=True)
class Measure:
    """One of the two scores.

    Attributes:
        place: of the score in `Score`.
        sign: +1 where more is better, -1 where less is.
        alike: with one seed, a smaller difference is none. Accuracy: the page's point; NLL: ten times what trials
            differ by that differ in nothing but a prior that hardly acts.
    """

    name: str
    unit: str
    place: int
    sign: int
    alike: float
    digits: int

    @property
    def label(self) -> str:
        """Its name beside an axis."""
        return f"{self.name}{self.unit} ({'more' if self.sign > 0 else 'less'} is better)"

    def best(self, numbers: Collection[float]) -> float:
        """Return the best of some numbers."""
        return (max if self.sign > 0 else min)(numbers)


ACCURACY = Measure("accuracy", " %", 0, 1, alike=1.0, digits=2)
NLL = Measure("NLL", "", 1, -1, alike=0.01, digits=3)
MEASURES = (ACCURACY, NLL)


def finding(name: str, curves: Curves) -> str:
    """Return from where to where each score goes on a data set and what is best, or that all are alike."""
    scores = {
        f"at {value}, {curve}" if curve else f"“{value.splitlines()[0]}”": score
        for curve, points in curves.items()
        for value, score in points.items()
    }
    return f"{name}: " + "; ".join(_spread(scores, measure) for measure in MEASURES)


def window(numbers: Collection[float], measure: Measure) -> tuple[float, float]:
    """Return which part of an axis to show: all numbers but those far off, for which it would have to triple.

    Examples:
        >>> window([77.0, 78.0, 76.0, 72.0], ACCURACY)
        (72.0, 78.0)
        >>> window([77.0, 78.0, 76.0, 10.0], ACCURACY)
        (76.0, 78.0)
    """
    best = measure.best(numbers)
    distances = sorted(abs(number - best) for number in numbers)
    quarter = distances[min(max(1, len(distances) // 4), len(distances) - 1)]
    reach = max(quarter, 4 * measure.alike)
    for distance in distances:
        if distance <= 3 * reach:
            reach = max(reach, distance)
    shown = [number for number in numbers if abs(number - best) <= reach]
    return at_least(min(shown), max(shown), measure)


def at_least(low: float, high: float, measure: Measure) -> tuple[float, float]:
    """Return limits that are not so near that a difference that says nothing fills the panel."""
    spare = max(0.0, 2 * measure.alike - (high - low)) / 2
    return low - spare, high + spare


def spaced(values: Collection[str]) -> dict[str, float]:
    """Return where values lie: at their logarithms where they span a decade; 0 is then a step before the others.

    Examples:
        >>> spaced({"0.1", "10.0", "1.0", "0"})
        {'0': -2.0, '0.1': -1.0, '1.0': 0.0, '10.0': 1.0}
        >>> spaced({"1", "3"})
        {'1': 1.0, '3': 3.0}
    """
    numbers = {value: float(value) for value in sorted(values, key=float)}
    positive = [number for number in numbers.values() if number > 0]
    if len(positive) < 2 or positive[-1] < 10 * positive[0]:
        return numbers
    before = math.log10(positive[0] ** 2 / positive[1])
    return {value: math.log10(number) if number else before for value, number in numbers.items()}


def joined(values: Collection[str]) -> Sequence[list[str]]:
    """Return what a line joins, in order: 0 stands alone, as it has no place on a logarithmic axis."""
    ordered = sorted(values, key=float)
    parts = [[value for value in ordered if float(value)], [value for value in ordered if not float(value)]]
    return [part for part in parts if part]


def _spread(scores: Mapping[str, Score], measure: Measure) -> str:
    numbers = {name: score[measure.place] for name, score in scores.items()}
    if len(numbers) < 2:
        return f"{measure.name}: one trial, nothing to compare"
    low, high, best = min(numbers.values()), max(numbers.values()), measure.best(numbers.values())
    if high - low < measure.alike:
        return f"{measure.name} alike (within {high - low:.2g}{' points' if measure.unit else ''})"
    names = next(name for name, number in numbers.items() if number == best)
    digits = measure.digits - 1
    return f"{measure.name} {low:.{digits}f}–{high:.{digits}f}{measure.unit}, best {names}"
