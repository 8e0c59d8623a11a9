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
    """Digits the network learned from; then those it met, with its answers before and after."""
    shown = results.file.shown
    axes = figure.subplots(2, len(shown.target_labels), squeeze=False)
    rows = (("It learned from these digits", shown.source), ("and meets these: what it says before → after", shown.target))
    for line, (title, images) in zip(axes, rows, strict=True):
        for ax, image in zip(line, images, strict=False):
            ax.imshow(image, cmap="gray_r", vmin=0, vmax=255)
            ax.set(xticks=[], yticks=[])
            for spine in ax.spines.values():
                spine.set_color(GREY)
        words = line[0].text(0, 1.15, title, fontsize=12, transform=line[0].transAxes)
        words.set_in_layout(False)
    for i, ax in enumerate(axes[1]):
        label = shown.target_labels[i]
        for x, answer in ((0.22, shown.before[i]), (0.78, shown.after[i])):
            colour = GREEN if answer == label else RED
            ax.text(x, -0.2, f"{answer}", color=colour, fontsize=14, fontweight="bold", ha="center", va="center",
                    transform=ax.transAxes)  # fmt: skip
        ax.text(0.5, -0.2, "→", color=GREY, fontsize=13, ha="center", va="center", transform=ax.transAxes)


def _bars(figure: Any, results: Results) -> None:
    """Accuracy of every row, on the scans and along the stream."""
    panels = figure.subplots(1, 2, sharey=True)
    names = list(results.table)
    for ax, online, title in zip(panels, (False, True), ("the scans", "a stream of damaged digits"), strict=True):
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
        ax.set_title(f"right on {title}, %", fontsize=12, loc="left")
        ax.set_xlim(0, 100)
        ax.set_xticks([])
        for side in ("top", "right", "bottom"):
            ax.spines[side].set_visible(False)
        ax.tick_params(length=0)
    panels[0].set_yticks(range(len(names)), names, fontsize=11)
    panels[0].get_yticklabels()[names.index(OURS.name)].set_fontweight("bold")
    panels[0].invert_yaxis()
