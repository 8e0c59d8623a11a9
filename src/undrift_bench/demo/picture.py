"""Draw the demo's picture: the digits, each method on both domains, and the stream."""

import io
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from undrift._errors import UndriftError
from undrift.judge.plots import BLUE, COLOURS, GREY, ORANGE
from undrift.system import atomic
from undrift_bench.demo import rows, streams
from undrift_bench.demo.results import Results

GREEN, VERMILION = COLOURS[2], COLOURS[5]
SHORT = {rows.CONTROL.name: "SHOT-BN =\nVMP, σ = 0", rows.VMP_LARGE.name: "VMP,\nvariance × 10"}
ACROSS = 6


def draw(results: Results, path: Path) -> int:
    """Draw the results into a PNG and return its size in bytes."""
    try:
        from matplotlib.figure import Figure  # a Figure of its own leaves the user's pyplot alone
    except ImportError as error:
        raise UndriftError(
            "matplotlib is not installed; the demo draws a picture with it. Install it: pip install 'undrift[plot]'."
        ) from error
    figure: Any = Figure(figsize=(15, 5.8), layout="constrained")
    figure.suptitle(results.headline, fontsize=15, fontweight="bold")
    left, middle, right = figure.subfigures(1, 3, width_ratios=(4.6, 4.6, 5.8))
    _digits(left, results)
    _bars(middle, results)
    _stream(right, results)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    return atomic.write_bytes(path, buffer.getvalue())


def _digits(figure: Any, results: Results) -> None:
    """Source digits; then the target's, those the adapted network is surest of and those it is least sure of."""
    shown = results.file.shown
    order = np.argsort(shown.entropy)
    examples = np.sort(np.unique(shown.source_labels, return_index=True)[1])[:ACROSS]  # each of another class
    groups = [
        ("Learned from: MNIST", shown.source[examples], shown.source_labels[examples], None),
        ("Adapted to: scans, the surest answers", *_some(results, order[:ACROSS])),
        ("the least sure", *_some(results, order[-2 * ACROSS : -ACROSS])),
        ("", *_some(results, order[-ACROSS:])),
    ]
    axes = figure.subplots(len(groups), ACROSS)
    for line, (title, images, labels, says) in zip(axes, groups, strict=True):
        for i, ax in enumerate(line):
            ax.imshow(images[i], cmap="gray_r", vmin=0, vmax=255)
            ax.set(xticks=[], yticks=[])
            answer, sure = (labels[i], None) if says is None else (says[0][i], says[1][i])
            right = answer == labels[i]
            text = f"{answer}" if sure is None else f"{answer}  {100 * sure:.0f} %"
            text = text if right else f"{text}\nis {labels[i]}"
            # Left out of the layout: it would make room for words in single columns.
            ax.set_xlabel(text, fontsize=9, color="black" if right else VERMILION).set_in_layout(False)
            for spine in ax.spines.values():
                spine.set_color(GREY if right else VERMILION)
                spine.set_linewidth(0.8 if right else 2)
        words = line[0].text(0, 1.12, title, fontsize=11, transform=line[0].transAxes)
        words.set_in_layout(False)


def _some(results: Results, places: Any) -> tuple[Any, Any, Any]:
    shown = results.file.shown
    return shown.target[places], shown.target_labels[places], (shown.answers[places], shown.confidence[places])


def _bars(figure: Any, results: Results) -> None:
    ax = figure.subplots()
    height = 0.38
    for place, seeds in enumerate(results.table.values()):
        for shift, colour, values in (
            (-height / 2, BLUE, [100 * s.target.accuracy for s in seeds]),
            (height / 2, ORANGE, [100 * s.source.accuracy for s in seeds]),
        ):
            mean, deviation = fmean(values), stdev(values)
            ax.barh(
                place + shift, mean, height, color=colour, xerr=deviation, error_kw={"capsize": 3, "elinewidth": 1.2}
            )
            ax.text(mean - 1, place + shift, f"{mean:.1f}", ha="right", va="center", color="white", fontsize=9)
    names = [SHORT.get(name, name) for name in results.table]
    ax.set_yticks(range(len(names)), names, fontsize=10)
    ax.invert_yaxis()
    ax.set_xlim(0, 100)
    ax.set_xlabel("accuracy % (bars: standard deviation of the seeds)")
    handles = [ax.patches[0], ax.patches[1]]
    ax.legend(handles, ["scans (target)", "MNIST, held out (source)"], frameon=False, ncols=2, fontsize=9,
              loc="lower center", bbox_to_anchor=(0.45, 1.0))  # fmt: skip
    _open(ax)


def _stream(figure: Any, results: Results) -> None:
    ax = figure.subplots()
    first = next(iter(results.streams.values()))[0]
    styles = {
        streams.SOURCE.name: (GREY, "-"),
        streams.TENT.name: (ORANGE, "-"),
        streams.VMP.name: (BLUE, "-"),
        streams.VMP_BATCH.name: (GREEN, "--"),
    }
    for name, (colour, line) in styles.items():
        runs = results.streams[name]
        steps = [100 * fmean(values) for values in zip(*(r.accuracy for r in runs), strict=True)]
        mean = 100 * fmean(r.mean for r in runs)
        ax.plot(range(len(steps)), steps, line, color=colour, linewidth=2, label=f"{name} ({mean:.0f} %)")
    batches = len(first.accuracy) // len(first.domains)
    for place, name in enumerate(first.domains):
        if place % 2 == 0:
            ax.axvspan(place * batches - 0.5, (place + 1) * batches - 0.5, color="0.94", zorder=0)
        ax.text((place + 0.5) * batches - 0.5, 103, name.replace("_", "\n"), ha="center", va="bottom", fontsize=9.5)
    ax.set(xlim=(-0.5, len(first.accuracy) - 0.5), ylim=(0, 102), xlabel="batch", ylabel="accuracy % on the batch")
    ax.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.11), fontsize=10, ncols=2)
    _open(ax)


def _open(ax: Any) -> None:
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
