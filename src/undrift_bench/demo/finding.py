"""Turn the seeds' numbers into sentences about VMP, also if it did not gain."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from undrift._errors import DataError

Outcome = Literal["gained", "lost", "no gain"]


@dataclass(frozen=True)
class Gain:
    """The difference between VMP and another row on the same images and seeds, in points of accuracy.

    Attributes:
        over: the other row.
        points: mean of the differences; above 0 VMP is better.
        deviation: standard deviation of the seeds' differences.
        error: standard error that the choice of images leaves on one seed's difference.
        seeds: how many.
    """

    over: str
    points: float
    deviation: float
    error: float
    seeds: int

    @property
    def doubt(self) -> float:
        """The larger of the two, as three seeds may agree on a small difference by chance."""
        return max(self.deviation, self.error)

    @property
    def outcome(self) -> Outcome:
        """Gained or lost only where the difference is more than twice the doubt."""
        if abs(self.points) <= 2 * self.doubt:
            return "no gain"
        return "gained" if self.points > 0 else "lost"

    def __str__(self) -> str:
        size = f"{abs(self.points):.2f} ± {self.deviation:.2f}"
        if self.outcome == "gained":
            return f"gained {size} points over {self.over}"
        if self.outcome == "lost":
            return f"lost {size} points against {self.over}"
        found = f"{self.points:+.2f} ± {self.deviation:.2f}, and ± {self.error:.2f} for the choice of images"
        return f"did NOT gain over {self.over} ({found})"


def gain(ours: Sequence[Sequence[bool]], theirs: Sequence[Sequence[bool]], over: str) -> Gain:
    """Return what one row gained over another.

    Args:
        ours: for each seed, for each image, whether the answer was right.
        theirs: the same seeds and images for the other row.
        over: its name.

    Examples:
        >>> print(gain([[True] * 50, [True] * 50], [[True] * 40 + [False] * 10] * 2, "Tent"))
        gained 20.00 ± 0.00 points over Tent
    """
    if len(ours) != len(theirs) or len(ours) < 2:
        raise DataError(
            f"{len(ours)} seeds meet {len(theirs)}; needed: the same number, two at least, as one seed has no "
            "deviation. Run more seeds."
        )
    by_image = [[100 * (a - b) for a, b in zip(*seed, strict=True)] for seed in zip(ours, theirs, strict=True)]
    by_seed = [statistics.fmean(seed) for seed in by_image]
    errors = [statistics.stdev(seed) / math.sqrt(len(seed)) for seed in by_image]
    points, deviation = statistics.fmean(by_seed), statistics.stdev(by_seed)
    return Gain(over, points, deviation, statistics.fmean(errors), len(by_seed))


def sentence(where: str, source: Gain, control: Gain, tent: Gain) -> str:
    """Return what VMP gained and what the noise had to do with it.

    Args:
        where: how it begins, such as "On the target".
        source: over the source network.
        control: over the same without noise.
        tent: over Tent.
    """
    facts = f"{where} VMP {source}, {control}, and {tent} ({source.seeds} seeds)."
    if control.outcome == "gained":
        return f"{facts} The noise itself paid."
    if control.outcome == "lost":
        return f"{facts} The noise cost accuracy: without it the same method does better."
    if source.outcome == "gained":
        return f"{facts} What was gained, the norm layers gained; the noise did not pay."
    return f"{facts} Nothing was gained, with noise or without."


def headline(before: float, after: float, source: Gain, control: Gain) -> str:
    """Return the finding in one line, for the picture: accuracy before and after, and the noise's part in it."""
    start, end = f"{100 * before:.0f} %", f"{100 * after:.0f} %"
    moved = {
        "gained": f"lifts {start} to {end}",
        "lost": f"lowers {start} to {end}",
        "no gain": f"does not move {start}",
    }[source.outcome]
    noise = {
        "gained": f"its noise adds {control.points:.1f} points over σ = 0",
        "lost": f"its noise costs {-control.points:.1f} points against σ = 0",
        "no gain": "its noise adds nothing over σ = 0",
    }[control.outcome]
    link = "and" if (source.outcome == "gained") == (control.outcome == "gained") else "but"
    return f"VMP {moved} on digits of another kind, {link} {noise}"


def spread(values: Sequence[float], scale: float = 1.0, digits: int = 1) -> str:
    """Return mean ± deviation; the mean alone where nothing deviates."""
    mean = scale * statistics.fmean(values)
    deviation = scale * statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{mean:.{digits}f}" + (f" ± {deviation:.{digits}f}" if deviation > 0 else "")
