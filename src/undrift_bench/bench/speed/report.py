"""The tables of `undrift bench speed`: ratios beside floors and bars, milliseconds and memory."""

from collections.abc import Callable
from typing import Any

from undrift_bench.bench.harness.limit import ANY
from undrift_bench.bench.harness.table import markdown
from undrift_bench.bench.speed.bars import STARTUP, Row, fastest, floor_over, ratios
from undrift_bench.bench.speed.growth import growth
from undrift_bench.bench.speed.kernels import OURS
from undrift_bench.bench.speed.modes import how
from undrift_bench.bench.speed.predict import FORM
from undrift_bench.bench.speed.predict_page import network_title, ways

Part = dict[str, Any]
"""Rows, machine and settings of one part, as they were written."""
MEMORIES = {
    "peak": "GiB allocated",
    "reserved": "GiB reserved",
    "kept": "GiB kept",
}
"""The kinds of memory that a step may have, and what their columns are called."""


def text(found: dict[str, Any]) -> str:
    """Return every table that there are numbers for, as Markdown."""
    parts = ["# Speed\n"]
    for name, section in SECTIONS.items():
        if found.get(name, {}).get("rows"):
            parts.append(section(found[name]))
    for name, part in found.get("unfinished", {}).items():
        parts += [f"# Unfinished: {name}\n", f"{len(part['rows'])} rows, as far as the run came.\n"]
        parts.append(SECTIONS[name](part))
    return "\n".join(parts)


def _about(part: Part) -> str:
    where = part["machine"]
    tried = " cuDNN's algorithms are those that a trial found quickest." if part.get("cudnn_benchmark") else ""
    return f"{where['hardware']}, torch {where['torch']}, {where['date']}.{tried}"


def steps(part: Part) -> str:
    """Return a line for each step, and the ratios beside floors and bars."""
    rows = part["rows"]
    memories = [name for name in MEMORIES if any(row.get(name) for row in rows)]
    lines = []
    for row in rows:
        base, case = fastest(rows, row["case"]["network"]), row["case"]
        ms = f"{row['ms']:.1f}" if "ms" in row else f"failed: {row.get('error', '')[:80]}"
        ratio = row["ms"] / base["ms"] if "ms" in row and base else None
        floor = floor_over(row, base) if base else None
        counts = (_count(row.get(name)) for name in ("extra_bytes", "operations"))
        sizes = (_number(_memory(row, name)) for name in memories)
        named = f"{case['network']}, batch {case['batch']}"
        lines.append((named, row["kind"], how(row), ms, _number(ratio), _number(floor), *counts, *sizes))
    header = ("network", "step", "mode", "ms", "× fastest Tent", "floor ×", "GB more", "G operations more")
    parts = [f"{_about(part)} A step is forward, KL, backward and optimiser, one sample; medians.\n"]
    parts += [markdown((*header, *(MEMORIES[name] for name in memories)), lines), _ratios(rows), _notes(memories)]
    return "\n".join(parts)


def _notes(memories: list[str]) -> str:
    """Return what the columns are, a line each."""
    lines = [
        "- Floor: Tent's time and that of what noise must move (GB) or compute (operations of ε), whichever is longer.",
    ]
    if "peak" in memories:
        lines.append(
            "- Allocated: the peak of what tensors take. A CUDA graph's own pool is in none of them: its rows have "
            "what is reserved, pools and cached blocks too; compare like with like."
        )
    if "kept" in memories:
        lines.append(
            "- Kept: what autograd holds between the forward and the backward pass, each piece of memory once; "
            "parameters, buffers and images not counted."
        )
    return "\n".join(lines) + "\n"


def _memory(row: Row, name: str) -> float | None:
    """Return GiB; what is allocated says nothing of a step with CUDA graphs."""
    return None if row.get(name) is None or (name == "peak" and row.get("graphs")) else row[name] / 1024


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _count(value: float | None) -> str:
    return "–" if value is None else f"{1e-9 * value:.1f}"


def _ratios(rows: list[Row]) -> str:
    lines = []
    for found in ratios(rows):
        held = "–" if found.limit == ANY else "yes" if found.limit.held(found.value) else "no"
        value = found.limit.shown(found.value).strip("*")
        lines.append((found.network, found.what, value, _number(found.floor), found.limit, held))
    return markdown(("network", "ratio", "found", "floor", "bar", "held"), lines)


def launches(part: Part) -> str:
    """Return kernel launches and waits of each step."""
    header = ("network", "step", "kernel launches", "waits", "copies to the host")
    keys = ("launches", "waits", "copies to host")
    lines = [(r["case"]["network"], r["kind"], *(r.get(k, "failed") for k in keys)) for r in part["rows"]]
    return "## Launches and waits a step, uncompiled\n\n" + markdown(header, lines)


def kernels(part: Part) -> str:
    """Return a table of kernel times, ours first, then the compiler's and all others'."""
    kinds = (*OURS, "compiler", "other")
    header = ("network", "step", "kernels", "all", *kinds)
    lines: list[tuple[Any, ...]] = []
    for row in part["rows"]:
        start = (row["case"]["network"], row["kind"])
        if (times := row.get("kernel_ms")) is None:
            lines.append((*start, "failed", *["–"] * (1 + len(kinds))))
            continue
        each = (f"{times[kind]:.2f}" if kind in times else "–" for kind in kinds)
        lines.append((*start, row["kernels"], f"{sum(times.values()):.2f}", *each))
    return "## Kernels of a compiled step: milliseconds by what they do\n\n" + markdown(header, lines)


def predictions(part: Part) -> str:
    """Return what each way to predict costs in noise-free forward passes, without a heading."""
    first = part["rows"][0]
    title = network_title(first["network"], "channels-last bf16" if first["low"] else "contiguous float32")
    present = all(row.get("fast") == FORM for row in part["rows"])
    bars = not part["machine"]["hardware"].startswith("CPU")
    return ways(part["rows"], f"Predictions, {title}; {_about(part).rstrip('.')}", present, bars)


def startup(part: Part) -> str:
    """Return the seconds of starting up, beside their bars."""
    lines = []
    for row in part["rows"]:
        limit = STARTUP.get(row["what"], ANY)
        held = "–" if limit == ANY else "yes" if limit.held(row["seconds"]) else "no"
        lines.append((row["what"], f"{row['seconds']:.2f}", limit, held))
    return f"## Start-up\n\n{_about(part)}\n\n" + markdown(("what", "seconds", "bar", "held"), lines)


SECTIONS: dict[str, Callable[[Part], str]] = {
    "steps": steps,
    "launches": launches,
    "kernels": kernels,
    "predict": lambda part: f"## Predictions over one noise-free forward pass\n\n{predictions(part)}\n",
    "startup": startup,
    "growth": growth,
}
