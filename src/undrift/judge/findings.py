"""Write the titles of plots, which state what they show; pool and name the data to draw."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from undrift.judge.metrics import Reliability
from undrift.packs.domain_file import Sigma

if TYPE_CHECKING:
    from undrift.judge.report import Report

CALIBRATED = 0.02


def sigma_finding(rows: Sequence[Sigma]) -> str:
    """Return where the noise is largest, in words."""
    means = [r.relative[0] for r in rows]
    top, middle = max(rows, key=lambda r: r.relative[0]), statistics.median(means)
    if max(means) == 0:
        return "No noise: σ is 0 in every layer"
    if max(means) < 1.01 * min(means):
        return f"σ is {middle:.2g} of a kernel's standard deviation in every layer: nothing has moved it"
    return (
        f"The noise is largest in {top.layer}:\nσ is {top.relative[0]:.2g} of a kernel's standard deviation, "
        f"in the median layer {middle:.2g}"
    )


def reliability_finding(bins: Reliability) -> str:
    """Return whether the network is over- or underconfident, in words."""
    total = sum(bins.counts)
    says, does = (
        sum(n * v for n, v in zip(bins.counts, values, strict=True)) / total
        for values in (bins.confidence, bins.accuracy)
    )
    word = "Overconfident" if says > does else "Underconfident"
    if bins.ece < CALIBRATED:
        word = "Well calibrated"
    elif abs(says - does) < bins.ece / 2:
        word = "Calibrated on average, not bin by bin"
    return f"{word} (ECE {100 * bins.ece:.1f} %):\nsure of {100 * says:.1f} %, right on {100 * does:.1f} %"


def domains_finding(named: "Mapping[str, Report]") -> str:
    """Return which domain is worst, or which of several networks is best, in words."""
    means = {name: 100 * r.summary["error"] for name, r in named.items()}
    if len(means) > 1:
        best, *others = sorted(means, key=lambda name: means[name])
        rest = ", ".join(f"{name} {means[name]:.1f} %" for name in others)
        return f"{best} errs least: {means[best]:.1f} % on average ({rest})"
    (only,) = named.values()
    errors = dict(zip(target_names(only), (100 * r.scores.error for r in only.of("target")), strict=True))
    worst, best = (pick(errors, key=lambda d: errors[d]) for pick in (max, min))
    if len(errors) == 1:
        return f"{errors[worst]:.1f} % error on {worst}"
    return f"Worst on {worst} ({errors[worst]:.1f} % error), best on {best} ({errors[best]:.1f} %)"


def risks_finding(named: "Mapping[str, Report]") -> str:
    """Return what answering half of the images gains, or in which of several networks confidence sorts best."""
    if len(named) > 1:
        areas = {name: 100 * found.summary["aurc"] for name, found in named.items()}
        best, *others = sorted(areas, key=lambda name: areas[name])
        rest = ", ".join(f"{name} {areas[name]:.1f}" for name in others)
        return f"{best} errs least among its surest:\nAURC × 100 is {areas[best]:.1f} ({rest})"
    (only,) = named.values()
    risks = mean_risks(only)
    half, whole = (100 * risks[k - 1] for k in (len(risks) // 2, len(risks)))
    return (
        f"{half:.1f} % error in the surest half, {whole:.1f} % in all\n(AURC × 100: {100 * only.summary['aurc']:.1f})"
    )


def has_risks(found: "Report") -> bool:
    """Return whether every target of a report has its risk–coverage curve."""
    return "aurc" in found.summary and all(r.risks for r in found.of("target"))


def mean_risks(found: "Report") -> list[float]:
    """Return the risk–coverage curve of a report: the mean of its targets', each counting once."""
    return [statistics.fmean(column) for column in zip(*(r.risks for r in found.of("target")), strict=True)]


def pooled(bins: Iterable[Reliability]) -> Reliability:
    """Return the bins of several domains as if their images were one set."""
    given = list(bins)
    counts = [sum(column) for column in zip(*(b.counts for b in given), strict=True)]
    means = [
        [
            sum(n * v for n, v in zip(ns, vs, strict=True)) / max(total, 1)
            for ns, vs, total in zip(
                zip(*(b.counts for b in given), strict=True),
                zip(*(getattr(b, name) for b in given), strict=True),
                counts,
                strict=True,
            )
        ]
        for name in ("confidence", "accuracy")
    ]
    return Reliability(tuple(counts), tuple(means[0]), tuple(means[1]))


def target_names(found: "Report") -> list[str]:
    """Return what a picture calls each target of a report."""
    return [" / ".join(filter(None, (r.task, r.domain if not r.task else ""))) for r in found.of("target")]
