"""Measure a step's time and memory over batch, image size, width, samples and classes."""

from typing import Any

from undrift_bench.bench.harness.table import markdown
from undrift_bench.bench.speed.bars import Row

KINDS = {"tent": "Tent", "vmp": "VMP", "fine-tune": "fine-tune"}


def memory(row: Row) -> float | None:
    """Return a step's own MiB, None where they are not known.

    A peak without what lay there `before` is none: all sizes share one process, and it holds what the others left.
    """
    kept = row.get("kept")
    return float(row["peak"]) if "before" in row else kept


def meaning(rows: list[Row]) -> str | None:
    """Return what the memory of these rows is, None where there is none."""
    if not any(memory(row) for row in rows):
        return None
    return "allocated" if any("before" in row for row in rows) else "kept"


def growth(part: dict[str, Any]) -> str:
    """Return milliseconds and MiB of each rival at each size."""
    found = {(r["axis"], r["size"], r["kind"]): r for r in part["rows"]}
    points = dict.fromkeys((axis, size) for axis, size, _ in found)
    what, lines = meaning(part["rows"]), []
    for axis, size in points:
        own = [found.get((axis, size, kind)) for kind in KINDS]
        times = [f"{row['ms']:.1f}" if row else "–" for row in own]
        tent, vmp, _ = own
        line = (axis, size, *times, f"{vmp['ms'] / tent['ms']:.2f}" if tent and vmp else "–")
        sizes = [memory(row) if row else None for row in own] if what else []
        lines.append((*line, *("–" if size is None else f"{size:.0f}" for size in sizes)))
    header = ["over", "size", *(f"{name} ms" for name in KINDS.values()), "VMP / Tent"]
    header += [f"{name} MiB {what}" for name in KINDS.values()] if what else []
    where = part["machine"]
    about = f"{where['hardware']}, torch {where['torch']}, {where['date']}."
    left_out = "" if what else " No memory: this record has no number for a step alone."
    return f"## Growth\n\n{about}{left_out}\n\n" + markdown(header, lines)
