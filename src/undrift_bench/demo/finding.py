"""Turn the seeds' numbers into sentences about undrift, also if it did not gain."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from undrift._errors import DataError

Outcome = Literal["gained", "lost", "no gain"]


@dataclass(frozen=True)
class Gain:
    """The difference between undrift and another row on the same images and seeds, in points of accuracy.

    Attributes:
        over: the other row.
        points: mean of the differences; above 0 undrift is better.
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


def noise_clause(twin: Gain) -> str:
    """Return what the noise did, in half a sentence."""
    if twin.outcome == "gained":
        return f"the noise adds {twin.points:.1f} points"
    if twin.outcome == "lost":
        return f"the noise costs {-twin.points:.1f} points: without it the recipe is better"
    return "the noise makes no difference"


def sentence(where: str, before: float, after: str, twin: Gain, rival: Gain) -> str:
    """Return the result of one column of the table.

    Args:
        where: which images, such as "the scans".
        before: accuracy of the source network, in per cent.
        after: that of undrift, with its deviation.
        twin: undrift's gain over itself without noise.
        rival: its gain over the best other row.
    """
    return (
        f"Without a label, undrift takes {where} from {before:.1f} to {after} % right ({twin.seeds} seeds); "
        f"it {rival}, the best rival, and {twin}: {noise_clause(twin)}."
    )


def headline(before: float, after: float) -> str:
    """Return the result in one line, for the picture."""
    if round(after) <= round(before):
        return f"undrift does not help here: {before:.0f} % right before, {after:.0f} % after"
    return f"A network that has never seen these digits: {before:.0f} % right. Adapted without a label: {after:.0f} %"


def spread(values: Sequence[float], scale: float = 1.0, digits: int = 1) -> str:
    """Return mean ± deviation; the mean alone where nothing deviates."""
    mean = scale * statistics.fmean(values)
    deviation = scale * statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{mean:.{digits}f}" + (f" ± {deviation:.{digits}f}" if deviation > 0 else "")
