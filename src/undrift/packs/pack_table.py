"""Print the packs of a network as a table."""

from collections.abc import Mapping

from undrift.packs.pack import Pack
from undrift.packs.router import SOURCE

HEADER = ("pack", "KB", "images", "changes", "routed", "answered")


def table(packs: Mapping[str, Pack], answered: Mapping[str, int], unknown: int) -> str:
    """Return a line for each pack.

    Args:
        answered: how many images each answered.
        unknown: how many images no pack knew.
    """
    rows = [(SOURCE, "–", "–", "–", "yes", f"{answered.get(SOURCE, 0):,}")]
    for name, pack in packs.items():
        images = pack.facts.get("images")
        rows.append(
            (
                name,
                f"{pack.size / 1000:,.0f}",
                "–" if images is None else f"{images:,}",
                "weights" if pack.options.train else "norm layers",
                "no" if pack.moments is None else "yes",
                f"{answered.get(name, 0):,}",
            )
        )
    widths = [max(len(row[i]) for row in (HEADER, *rows)) for i in range(len(HEADER))]
    head, *body = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (HEADER, *rows)
    )
    fit = "1 image fits" if unknown == 1 else f"{unknown:,} images fit"
    return "\n".join([head, "─" * len(head), *body, f"{fit} neither a pack nor the source"])
