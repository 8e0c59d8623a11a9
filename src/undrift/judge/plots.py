"""Plot σ per layer, reliability, risk against coverage, and error per domain; each title says what it shows.

Drawn without pyplot: no screen is needed, and the user's backend stays. Files are written whole or not at all.
"""

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from undrift._errors import DataError, OptionError, UndriftError
from undrift.judge.findings import (
    domains_finding,
    has_risks,
    mean_risks,
    pooled,
    reliability_finding,
    risks_finding,
    sigma_finding,
    target_names,
)
from undrift.judge.metrics import Reliability
from undrift.packs.domain_file import DomainFile, sigmas
from undrift.posterior.perturbed import Perturbed
from undrift.system.atomic import check, write_bytes

if TYPE_CHECKING:
    from undrift.judge.report import Report

# Okabe and Ito's colours, told apart under every common kind of colour blindness.
BLUE, ORANGE, SKY, GREY = "#0072B2", "#E69F00", "#56B4E9", "#999999"
PALE = "#F7D794"
COLOURS = (BLUE, ORANGE, "#009E73", "#CC79A7", SKY, "#D55E00")
MOST_NAMES = 60


def sigma(model: Perturbed | DomainFile, path: str | os.PathLike[str]) -> int:
    """Draw σ per layer, over its kernel's standard deviation and as the paper's ℓ1 norm; return the file's size."""
    rows = model.sigmas if isinstance(model, DomainFile) else sigmas(model)
    if not rows:
        named = model.path.name if isinstance(model, DomainFile) else "this model"
        raise DataError(
            f"{named} has no layer with noise, so no σ; needed: one at least for a picture of σ. Methods such as tent "
            "and norm-stats make none: leave the picture out, or adapt with one that does, such as vmp."
        )
    figure = _figure(path, 9.5, min(1.8 + 0.2 * len(rows), 14))
    relative, l1 = figure.subplots(1, 2, sharey=True)
    places = range(len(rows))
    for at, row in zip(places, rows, strict=True):
        relative.plot(row.relative[1:], (at, at), color=SKY, linewidth=4, solid_capstyle="round")
    relative.plot([r.relative[0] for r in rows], places, "o", color=BLUE, markersize=4.5)
    relative.set_xlabel("σ / standard deviation of its kernel\n(dot: mean, bar: range in the layer)")
    least, most = min(r.relative[1] for r in rows), max(r.relative[2] for r in rows)
    if 0 < 10 * least < most:
        relative.set_xscale("log")
        relative.xaxis.set_minor_formatter("")  # powers of ten are enough; more would overlap
    else:
        relative.set_xlim(left=0)
    l1.barh(places, [r.l1 for r in rows], color=ORANGE, height=0.7)
    l1.set_xlabel("Σσ, the ℓ1 norm of σ in the layer\n(one σ a kernel where it is shared)")
    step = -(-len(rows) // MOST_NAMES)
    relative.set_yticks(places[::step], [_plain(r.layer) for r in rows][::step])
    relative.set_ylim(len(rows) - 0.4, -0.6)  # the network's first layer on top
    figure.suptitle(_plain(sigma_finding(rows)), fontsize=11, fontweight="bold")
    return _save(figure, path, grid="x")


def reliability(report: "Report", path: str | os.PathLike[str]) -> int:
    """Draw the reliability diagram of a report's targets, all together; return the file's size."""
    figure = _figure(path, 5, 5.4)
    _draw_reliability(figure, pooled(r.reliability for r in report.of("target")))
    return _save(figure, path)


def risk_coverage(reports: "Report | Mapping[str, Report]", path: str | os.PathLike[str]) -> int:
    """Draw the error among the surest images against how many are answered, of one report or of several by name.

    A curve is the mean over a report's targets, at equal coverage. Returns the file's size.
    """
    named = _named(reports)
    if without := [name or "the report" for name, found in named.items() if not has_risks(found)]:
        raise DataError(
            f"{', '.join(without)} has no risk–coverage curve, as it was saved by an older undrift; needed: one with "
            "it. Run the evaluation again."
        )
    figure = _figure(path, 5, 4.6)
    _draw_risks(figure.subplots(), named)
    return _save(figure, path)


def domains(reports: "Report | Mapping[str, Report]", path: str | os.PathLike[str]) -> int:
    """Draw the error on each domain, of one report or of several by name; return the file's size."""
    named = _named(reports)
    labels = target_names(next(iter(named.values())))
    figure = _figure(path, max(6.0, 2 + 0.25 * len(labels) * (1 + len(named))), 4.6)
    _draw_domains(figure.subplots(), named)
    return _save(figure, path)


def report(found: "Report", path: str | os.PathLike[str]) -> int:
    """Draw a report: error on each domain, reliability, and risk against coverage where it is known.

    Returns the file's size.
    """
    width = max(4.0, 1.5 + 0.45 * len(found.of("target")))
    widths = (width, 5, 4.5) if has_risks(found) else (width, 5)
    figure = _figure(path, sum(widths), 5.4)
    left, middle, *right = figure.subfigures(1, len(widths), width_ratios=widths)
    _draw_domains(left.subplots(), {"": found})
    _draw_reliability(middle, pooled(r.reliability for r in found.of("target")))
    for part in right:
        _draw_risks(part.subplots(), {"": found})
    return _save(figure, path)


# Drawing ------------------------------------------------------------------------------------------------------------


def _draw_reliability(figure: Any, bins: Reliability) -> None:
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    number = len(bins.counts)
    centres = [(i + 0.5) / number for i in range(number)]
    kept = [i for i in range(number) if bins.counts[i]]
    accuracy = [bins.accuracy[i] for i in kept]
    gaps = [bins.confidence[i] - bins.accuracy[i] for i in kept]
    where = [centres[i] for i in kept]
    upper.bar(where, accuracy, 0.92 / number, color=BLUE, label="accuracy")
    upper.bar(where, gaps, 0.92 / number, bottom=accuracy, color=PALE, edgecolor=ORANGE, label="gap to confidence")
    upper.plot((0, 1), (0, 1), "--", color="black", linewidth=1)
    upper.set(xlim=(0, 1), ylim=(0, 1), ylabel="accuracy")
    upper.legend(frameon=False, loc="upper left")
    upper.set_title(reliability_finding(bins), fontsize=10, fontweight="bold")
    lower.bar(centres, [n / sum(bins.counts) for n in bins.counts], 0.92 / number, color=GREY)
    lower.set(xlabel="confidence", ylabel="images")


def _draw_risks(axes: Any, named: "Mapping[str, Report]") -> None:
    for i, (name, found) in enumerate(named.items()):
        colour, risks = COLOURS[i % len(COLOURS)], mean_risks(found)
        answered = [100 * (k + 1) / len(risks) for k in range(len(risks))]
        line = "-" if i < len(COLOURS) else ":"
        axes.plot(answered, [100 * r for r in risks], line, color=colour, linewidth=2, label=_plain(name) or None)
        axes.axhline(100 * risks[-1], linestyle="--", linewidth=1, color=colour)  # a confidence that says nothing
    axes.set(xlim=(0, 100), xlabel="answered, the surest first, %", ylabel="error % among these")
    axes.set_ylim(bottom=0)
    axes.set_title(_plain(risks_finding(named)), fontsize=10, fontweight="bold")
    if any(named):
        axes.legend(frameon=False)


def _draw_domains(axes: Any, named: "Mapping[str, Report]") -> None:
    labels = target_names(next(iter(named.values())))
    width = 0.8 / len(named)
    for i, (name, found) in enumerate(named.items()):
        if target_names(found) != labels:
            raise DataError(
                f"{name} has the domains {', '.join(target_names(found))}, the first report {', '.join(labels)}; "
                "needed: the same ones in each. Draw them separately."
            )
        colour, errors = COLOURS[i % len(COLOURS)], [100 * r.scores.error for r in found.of("target")]
        where = [at + (i - (len(named) - 1) / 2) * width for at in range(len(labels))]
        axes.bar(
            where,
            errors,
            0.9 * width,
            color=colour,
            label=_plain(name) or None,
            hatch="//" if i >= len(COLOURS) else None,
        )
        mean = 100 * found.summary["error"]
        if len(labels) > 1:
            axes.axhline(mean, linestyle="--", linewidth=1, color=colour)
    if len(named) == 1 and len(labels) > 1:
        white = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
        place = (0.995, mean)
        axes.annotate(
            f"mean {mean:.1f} %", place, xycoords=("axes fraction", "data"), ha="right", va="bottom", bbox=white
        )
    spare = 0.6 + max(0, 3 - len(labels)) / 2  # a lone bar should not fill the picture
    axes.set_xlim(-spare, len(labels) - 1 + spare)
    turned = len(labels) > 3
    axes.set_xticks(
        range(len(labels)), map(_plain, labels), rotation=45 if turned else 0, ha="right" if turned else "center"
    )
    axes.set_ylabel("error %")
    axes.set_title(_plain(domains_finding(named)), fontsize=10, fontweight="bold")
    if any(named):
        axes.legend(frameon=False)


def _named(reports: "Report | Mapping[str, Report]") -> "dict[str, Report]":
    named = dict(reports) if isinstance(reports, Mapping) else {"": reports}
    if not named:
        raise DataError("no reports were given; needed: one, or a mapping from names to reports. Evaluate first.")
    return named


def _plain(text: str) -> str:
    """Escape a text for matplotlib, which reads what stands between dollar signs as a formula."""
    return text.replace("$", r"\$")


def _figure(path: str | os.PathLike[str], width: float, height: float) -> Any:
    """Return an empty figure, after checking that it can be saved."""
    if Path(path).suffix.lower() != ".png":
        raise OptionError(f"{path} does not end in .png; pictures are PNG files. Name it {Path(path).stem}.png.")
    check(path)
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UndriftError(
            'matplotlib is not installed; pictures need it. Install it: python -m pip install "undrift[plot]".'
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Any, path: str | os.PathLike[str], grid: str = "y") -> int:
    for axes in figure.get_axes():
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis=grid, color="#E5E5E5", linewidth=0.6)
        axes.set_axisbelow(True)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return write_bytes(path, buffer.getvalue())
