"""Draw the demo's picture: digits before and after on the left, accuracy by method on the right."""

import io
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from undrift._errors import UndriftError
from undrift.judge.plots import BLUE, COLOURS, GREY
from undrift.system import atomic
from undrift_bench.demo.results import Results
from undrift_bench.demo.rows import OURS, TWIN

GREEN, RED = COLOURS[2], COLOURS[5]


def draw(results: Results, path: Path) -> int:
    """Draw the results into a PNG and return its size in bytes."""
    try:
        from matplotlib.figure import Figure  # a Figure of its own leaves the user's pyplot alone
    except ImportError as error:
        raise UndriftError(
            "matplotlib is not installed; the demo draws a picture with it. Install it: pip install 'undrift[plot]'."
        ) from error
    figure: Any = Figure(figsize=(13, 4.6), layout="constrained")
    figure.suptitle(results.headline, fontsize=15, fontweight="bold")
    left, right = figure.subfigures(1, 2, width_ratios=(5, 8))
    _digits(left, results)
    _bars(right, results)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    return atomic.write_bytes(path, buffer.getvalue())


def _digits(figure: Any, results: Results) -> None:
    """Digits the network learned from; then the first ones it met, with its answers before and after."""
    shown = results.file.shown
    across = len(shown.source)
    axes = figure.subplots(1 + len(shown.target) // across, across, squeeze=False)
    for ax, image in zip(axes.flat, (*shown.source, *shown.target), strict=False):
        ax.imshow(image, cmap="gray_r", vmin=0, vmax=255)
        ax.set(xticks=[], yticks=[])
        for spine in ax.spines.values():
            spine.set_color(GREY)
    for line, title in enumerate(("It learned from these digits,", "and meets these. Its answers before → after:")):
        _write(axes[line, 0], 0, 1.2, title, fontsize=12)
    for ax, label, before, after in zip(axes[1:].flat, shown.target_labels, shown.before, shown.after, strict=False):
        strong = {"fontsize": 13, "fontweight": "bold", "ha": "center"}
        _write(ax, 0.2, -0.17, str(before), color=_colour(before == label), **strong)
        _write(ax, 0.5, -0.17, "→", color=GREY, **strong)
        _write(ax, 0.8, -0.17, str(after), color=_colour(after == label), **strong)


def _write(ax: Any, x: float, y: float, text: str, **style: Any) -> None:
    """Write beside an image, left out of the layout: it would make room for words in single columns."""
    ax.text(x, y, text, va="center", transform=ax.transAxes, **style).set_in_layout(False)


def _colour(right: bool) -> str:
    return GREEN if right else RED


def _bars(figure: Any, results: Results) -> None:
    """Accuracy of every row, on the scans and along the stream."""
    panels = figure.subplots(1, 2, sharey=True)
    names = list(results.table)
    for ax, online, title in zip(panels, (False, True), ("those scans", "a damaged stream"), strict=True):
        for place, name in enumerate(names):
            if online and name not in results.streams:
                ax.text(2, place, "needs the whole domain", va="center", color=GREY, fontsize=9)
                continue
            values = results.accuracy(name, online=online)
            mean, ours = fmean(values), name == OURS.name
            colour = BLUE if ours else ("#9dbfdf" if name == TWIN.name else "0.75")
            ax.barh(place, mean, 0.7, color=colour, xerr=stdev(values), error_kw={"elinewidth": 1.2, "capsize": 3})
            ax.text(mean / 2, place, f"{mean:.1f}", ha="center", va="center", fontsize=11,
                    color="white" if ours else "black", fontweight="bold" if ours else None)  # fmt: skip
        ax.set_title(f"% right on {title}", fontsize=12, loc="left")
        ax.set_xlim(0, 100)
        ax.set_xticks([])
        for side in ("top", "right", "bottom"):
            ax.spines[side].set_visible(False)
        ax.tick_params(length=0)
    panels[0].set_yticks(range(len(names)), names, fontsize=11)
    panels[0].get_yticklabels()[names.index(OURS.name)].set_fontweight("bold")
    panels[0].invert_yaxis()
