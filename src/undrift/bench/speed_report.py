"""The tables and the figure of `undrift bench speed`: ratios first, milliseconds beside them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from undrift.bench.speed_kernels import OURS
from undrift.bench.table import markdown
from undrift.plots import BLUE, GREY, ORANGE, _figure, _save

# What of VMP's is divided by what of Tent's, among which steps, and the most that it should be.
BARS: tuple[tuple[str, str, Callable[[dict[str, Any]], bool], float], ...] = (
    ("VMP over Tent, each in its fastest mode", "ms", lambda _: True, 1.25),
    ("the same without CUDA graphs", "ms", lambda row: not row.get("graphs"), 1.25),
    ("peak memory of the same", "peak", lambda row: not row.get("graphs"), 1.25),
    ("VMP over Tent, uncompiled", "ms", lambda row: not row["compiled"] and not row.get("graphs"), 1.6),
    ("VMP over Tent, uncompiled, CUDA graphs", "ms", lambda row: not row["compiled"] and row.get("graphs", False), 1.6),
)
RELEASED = {"WRN-28": 5.0, "ResNet-50": 3.5}


def text(found: dict[str, Any]) -> str:
    """Return every table that there are numbers for, as Markdown."""
    parts = ["# Speed\n"]
    if rows := _rows(found, "steps"):
        parts += [_about(found["steps"]), _steps(rows), _ratios(rows)]
    if rows := _rows(found, "launches"):
        header = ("network", "step", "kernel launches", "waits", "copies to the host")
        keys = ("launches", "waits", "copies to host")
        lines = [(r["case"]["network"], r["kind"], *(r.get(k, "failed") for k in keys)) for r in rows]
        parts += ["## Launches and waits a step, uncompiled\n", markdown(header, lines)]
    if rows := _rows(found, "kernels"):
        parts += ["## Kernels of a compiled step: milliseconds by what they do\n", kernels(rows)]
    if rows := _rows(found, "startup"):
        lines = [(r["what"], f"{r['seconds']:.2f}") for r in rows]
        parts += ["## Start-up\n", markdown(("what", "seconds"), lines)]
    if rows := _rows(found, "growth"):
        parts += ["## Growth\n", _growth(rows)]
    return "\n".join(parts)


def _rows(found: dict[str, Any], part: str) -> list[dict[str, Any]]:
    return list(found.get(part, {}).get("rows", ()))


def _about(part: dict[str, Any]) -> str:
    where = part["machine"]
    return (
        f"{where['hardware']}, torch {where['torch']}, {where['date']}. A step is forward, KL, backward and optimiser, "
        "one sample; medians.\n"
    )


def how(row: dict[str, Any]) -> str:
    """Return in which mode a step ran."""
    layout = "channels-last bf16" if row["low"] else "contiguous float32"
    return (
        f"{layout}, {'compiled' if row.get('compiled') else 'uncompiled'}{', CUDA graphs' * row.get('graphs', False)}"
    )


def _steps(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        base = _fastest(rows, row["case"]["network"])
        ratio = f"{row['ms'] / base['ms']:.2f}" if "ms" in row and base else "–"
        memory = f"{row['peak'] / 1024:.2f}" if row.get("peak") else "–"
        ms = f"{row['ms']:.1f}" if "ms" in row else f"failed: {row.get('error', '')[:80]}"
        case = row["case"]
        floor = f"{1 + row['extra_ms'] / base['ms']:.2f}" if base and "extra_ms" in row else "–"
        lines.append((f"{case['network']}, batch {case['batch']}", row["kind"], how(row), ms, ratio, floor, memory))
    return markdown(("network", "step", "mode", "ms", "× fastest Tent", "floor ×", "GiB"), lines)


def ratios(rows: list[dict[str, Any]]) -> list[tuple[str, str, float, float]]:
    """Return network, what is compared, the ratio found, and the bar it should keep (at most, or at least)."""
    out = []
    for network in dict.fromkeys(row["case"]["network"] for row in rows):
        for what, of, among, bar in BARS:
            if (bar == 1.25) > any(row["compiled"] for row in rows):
                continue  # bars of compiled steps, where nothing was compiled
            tent, vmp = (_fastest([r for r in rows if among(r)], network, kind) for kind in ("tent", "vmp"))
            if tent and vmp:
                out.append((network, what, vmp[of] / tent[of], bar))
        released, vmp = (_fastest(rows, network, kind) for kind in ("released", "vmp"))
        if released and vmp:
            out.append(
                (network, "released formulation over VMP", released["ms"] / vmp["ms"], -RELEASED.get(network, 1))
            )
    return out


def _ratios(rows: list[dict[str, Any]]) -> str:
    lines = []
    for network, what, ratio, bar in ratios(rows):
        wanted = f"≤ {bar}" if bar > 0 else f"≥ {-bar}"
        held = ratio <= bar if bar > 0 else ratio >= -bar
        lines.append((network, what, f"{ratio:.2f}", wanted, "yes" if held else "no"))
    return markdown(("network", "ratio", "found", "bar", "held"), lines)


def _fastest(rows: list[dict[str, Any]], network: str, kind: str = "tent") -> dict[str, Any] | None:
    own = [r for r in rows if r["case"]["network"] == network and r["kind"] == kind and "ms" in r]
    return min(own, key=lambda r: r["ms"], default=None)


def kernels(rows: list[dict[str, Any]]) -> str:
    """Return a table of kernel times, ours first, then the compiler's and all others'."""
    kinds = (*OURS, "compiler", "other")
    header = ("network", "step", "kernels", "all", *kinds)
    lines: list[tuple[Any, ...]] = []
    for row in rows:
        start = (row["case"]["network"], row["kind"])
        if (times := row.get("kernel_ms")) is None:
            lines.append((*start, "failed", *["–"] * (1 + len(kinds))))
            continue
        each = (f"{times[kind]:.2f}" if kind in times else "–" for kind in kinds)
        lines.append((*start, row["kernels"], f"{sum(times.values()):.2f}", *each))
    return markdown(header, lines)


def _growth(rows: list[dict[str, Any]]) -> str:
    points = dict.fromkeys((r["axis"], r["size"]) for r in rows)
    found = {(r["axis"], r["size"], r["kind"]): r for r in rows}
    lines = []
    for axis, size in points:
        own = {kind: found.get((axis, size, kind)) for kind in ("tent", "vmp", "fine-tune")}
        times = [f"{r['ms']:.1f}" if r else "–" for r in own.values()]
        memory = [f"{r['peak'] / 1024:.2f}" if r and r["peak"] else "–" for r in own.values()]
        tent, vmp = own["tent"], own["vmp"]
        lines.append((axis, size, *times, f"{vmp['ms'] / tent['ms']:.2f}" if tent and vmp else "–", *memory))
    names = ("Tent", "VMP", "fine-tune")
    return markdown(("over", "size", *(f"{n} ms" for n in names), "VMP / Tent", *(f"{n} GiB" for n in names)), lines)


def figure(path: Path, found: dict[str, Any]) -> int:
    """Draw milliseconds over each size, a panel each; return the file's size."""
    rows = _rows(found, "growth")
    axes = list(dict.fromkeys(r["axis"] for r in rows))
    picture = _figure(path, 2.9 * len(axes), 3.4)
    for plot, axis in zip(picture.subplots(1, len(axes), squeeze=False)[0], axes, strict=True):
        for kind, colour in (("tent", GREY), ("vmp", BLUE), ("fine-tune", ORANGE)):
            own = sorted((r["size"], r["ms"]) for r in rows if r["axis"] == axis and r["kind"] == kind)
            plot.plot([s for s, _ in own], [t for _, t in own], marker="o", color=colour, label=kind)
        plot.set_xscale("log", base=2)
        plot.set_yscale("log")
        plot.set(xlabel=axis, ylabel="ms a step" if axis == axes[0] else "")
    picture.axes[0].legend(frameon=False, fontsize=8)
    picture.suptitle("A step over batch, image, width, samples and classes", fontsize=11, fontweight="bold")
    return _save(picture, path)
