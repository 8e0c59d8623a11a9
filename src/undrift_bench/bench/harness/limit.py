"""Bars set before a measurement, and how a number is shown beside its bar."""

import math
from dataclasses import dataclass

NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Limit:
    """The least and the most that a number should be.

    Examples:
        >>> Limit(most=1.25).shown(1.2), Limit(most=1.25).shown(1.31), Limit(least=5.0).shown(None)
        ('1.20', '**1.31**', 'not measured')
        >>> str(Limit(most=1.25)), str(Limit(least=5.0)), str(Limit())
        ('≤ 1.25', '≥ 5', '–')
    """

    least: float = -math.inf
    most: float = math.inf

    def held(self, value: float) -> bool:
        """Return whether a number keeps the bar."""
        return self.least <= value <= self.most

    def shown(self, value: float | None, digits: int = 2, sign: str = "") -> str:
        """Return a number as text, bold where it misses the bar; more digits where fewer would hide on which side.

        Args:
            value: None where it was not measured.
            digits: behind the point.
            sign: "+" writes the sign of a positive number as well.
        """
        if value is None:
            return NOT_MEASURED
        texts = (f"{value:{sign}.{more}f}" for more in range(digits, 16))
        text = next((text for text in texts if self.held(float(text)) == self.held(value)), str(value))
        text = text.replace("-", "−")
        return text if self.held(value) else f"**{text}**"

    def __str__(self) -> str:
        """Return the bar as text."""
        sides = [f"≥ {self.least:g}"] * (self.least > -math.inf) + [f"≤ {self.most:g}"] * (self.most < math.inf)
        return ", ".join(sides) or "–"


ANY = Limit()
