"""Write HTML: every text from outside goes through `text`, and every number through `number` or `percent`."""

import html
import math
from collections.abc import Iterable, Mapping

MINUS = "\N{MINUS SIGN}"
NONE = "–"
"""Stands for a number that there is not."""


def text(value: object) -> str:
    """Return a text as HTML that shows it: escaped, and without characters that HTML forbids.

    Examples:
        >>> text("<b> & 'c'")
        '&lt;b&gt; &amp; &#x27;c&#x27;'
    """
    # A file's name that is not UTF-8 comes as lone surrogates.
    plain = str(value).encode("utf-8", "replace").decode()
    return html.escape("".join(c if c.isprintable() or c in "\n " else "\N{REPLACEMENT CHARACTER}" for c in plain))


def percent(share: float | None, digits: int = 1) -> str:
    """Return a share as per cent, "–" where it is no finite number.

    Examples:
        >>> percent(0.1234), percent(float("nan"))
        ('12.3 %', '–')
    """
    if share is None or not math.isfinite(share):
        return NONE
    return f"{100 * share:.{digits}f} %".replace("-", MINUS)


def number(value: float | None, digits: int = 3) -> str:
    """Return a number with so many digits, "–" where it is not finite.

    Examples:
        >>> number(1234), number(0.00012345), number(float("inf"))
        ('1,234', '0.000123', '–')
    """
    if value is None or not math.isfinite(value):
        return NONE
    whole = isinstance(value, int) or (float(value).is_integer() and abs(value) < 1e15)
    return (f"{int(value):,}" if whole else f"{value:.{digits}g}").replace("-", MINUS)


def table(rows: Iterable[tuple[object, object]]) -> str:
    """Return a table of names and values."""
    body = "".join(f"<tr><th scope=row>{text(name)}</th><td>{text(value)}</td></tr>" for name, value in rows)
    return f"<div class=scroll><table>{body}</table></div>" if body else ""


def folded(title: str, content: str) -> str:
    """Return content that is shown on a click, and on paper."""
    return f"<details><summary>{text(title)}</summary>{content}</details>" if content else ""


def flat(values: Mapping[str, object], before: str = "") -> list[tuple[str, str]]:
    """Return nested values as rows of a table: names joined by dots, lists by commas."""
    rows: list[tuple[str, str]] = []
    for name, value in values.items():
        whole = f"{before}{name}"
        if isinstance(value, Mapping):
            rows += flat(value, f"{whole}.")
        elif isinstance(value, list | tuple | set | frozenset):
            rows.append((whole, ", ".join(map(str, value)) or "none"))
        else:
            rows.append((whole, "none" if value is None else str(value)))
    return rows
