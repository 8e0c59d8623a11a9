"""The cards of a page: each shows one result, and is None if there is nothing to show."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from undrift.judge.findings import CALIBRATED, reliability_finding, sigma_finding
from undrift.judge.metrics import Reliability
from undrift.judge.page import charts
from undrift.judge.page.charts import FLAGS, Axis, Mark
from undrift.judge.page.document import Card
from undrift.judge.page.markup import number, percent, text
from undrift.judge.page.recording import CurvePoint, Recording, ShownImage
from undrift.judge.page.thumbnail import data_uri
from undrift.packs.domain_file import Sigma

if TYPE_CHECKING:
    from undrift.judge.history import HistoryRow

MOST_CLASSES = 12
BOTH = (("source", "source network"), ("adapted", "adapted"))
FEW = 3
"""Fewer points than this make no curve."""

_TITLES = {
    "surest": "The surest answers",
    "least sure": "The least sure answers",
    "surest mistakes": "The surest mistakes",
}


def over_time(seen: Recording | None, marks: Sequence[Mark], switches: Sequence[tuple[int, str]] = ()) -> Card | None:
    """Return error (with labels) or confidence over the images of a stream, with what happened when."""
    points = [] if seen is None else seen.curve
    labelled = any(p.labelled for p in points)
    if len(points) < FEW and not marks and len(switches) < 2:
        return None
    total = sum(p.images for p in points) or max([mark.at for mark in marks] + [at for at, _ in switches], default=1)
    x = charts.counts(0, total, "images")
    happened = sorted([*marks, *_arrivals(switches)], key=_at)
    values = [(_middle(points, i), _value(p, labelled)) for i, p in enumerate(points)]
    asked = [] if labelled else [(_middle(points, i), p.source_sure / p.asked) for i, p in enumerate(points) if p.asked]
    low, high = charts.spread([v for _, v in (*values, *asked)], zero=labelled)
    y = charts.shares(max(0.0, low), min(1.0, high), "error" if labelled else "mean confidence")
    lines, flags = charts.marked(happened, x)
    curve = charts.line(asked, x, y, "source") + charts.line(values, x, y, "adapted")
    if labelled:
        wrong = sum(p.wrong for p in points) / sum(p.labelled for p in points)
        title = f"Error over time, {percent(wrong)} on average"
    elif happened:
        count = Counter(mark.kind for mark in happened)
        told = (("domain", "the domain changed"), ("acted", "the guard acted"), ("note", "the stream adjusted itself"))
        title = "; ".join(f"{what} {times(count[kind])}" for kind, what in told if count[kind])
        title = title[0].upper() + title[1:]
    else:
        title = "Confidence over time: one domain, and nothing to repair"
    about = f"{'error' if labelled else 'mean confidence'} over {total:,} images"
    body = charts.chart(lines + curve, x, y, about, over=flags, height=15)
    body += _strip(switches, total) + _happened(happened)
    keys = [("source", "source network")] * bool(asked) + [("adapted", "adapted")]
    keys += [("marks", "the guard acted")] * any(mark.kind == "acted" for mark in happened)
    note = (
        "" if labelled else "Without labels the error is unknown. Falling confidence means that images fit less well."
    )
    return Card(title, body + charts.legend(keys), note, wide=True)


def training(rows: "Sequence[HistoryRow]", epochs: "Sequence[HistoryRow]", kept: int) -> Card | None:
    """Return entropy and class balance over the steps of an adaptation."""
    if len(rows) < FEW:
        return None
    x = charts.counts(rows[0].step, rows[-1].step, "step")
    low, high = charts.spread([r.entropy for r in rows], zero=True)
    y = charts.numbers(max(0.0, low), high, "entropy of the answers, in nats")
    marks = charts.line([(r.step, r.entropy) for r in rows], x, y, "adapted thin")
    # An epoch's mean belongs to the middle of its steps.
    ends = pairwise([rows[0].step, *(r.step for r in epochs)])
    means = [((a + b) / 2, r.entropy) for (a, b), r in zip(ends, epochs, strict=True)] if len(epochs) > 1 else []
    marks += charts.line(means, x, y, "adapted")
    first, last = epochs[0].entropy, epochs[-1].entropy
    where = f"; epoch {kept} was kept" if kept and kept != epochs[-1].epoch else ""
    if len(epochs) > 1 and f"{first:.2f}" == f"{last:.2f}":
        title = f"Answers stayed as sure: entropy {last:.2f}{where}"
    elif len(epochs) > 1:
        title = f"Answers grew {'surer' if last < first else 'less sure'}: entropy {first:.2f} → {last:.2f}{where}"
    else:
        title = f"One epoch, entropy {first:.2f} on average"
    left = charts.chart(marks, x, y, f"entropy over {len(rows):,} steps")
    note = "Low entropy is confidence. It is good news only while the answers stay diverse."
    keys = [("adapted", "mean of an epoch")] if means else []
    return Card(title, left + (charts.legend(keys) if keys else ""), note)


def confidence(source: Sequence[int], adapted: Sequence[int], means: tuple[float, float], images: str) -> Card | None:
    """Return both networks' histograms of confidence; the source's may be empty."""
    if not sum(adapted):
        return None
    shares = [n / sum(adapted) for n in adapted]
    before = [n / sum(source) for n in source] if sum(source) else []
    x, y = (
        charts.shares(title="confidence of an answer"),
        charts.shares(0, 1.1 * max(shares + before), "share of images"),
    )
    size = len(shares)
    names = [
        f"confidence {percent(i / size, 0)} to {percent((i + 1) / size, 0)}: {percent(s)}" for i, s in enumerate(shares)
    ]
    marks = charts.bars(shares, y, "adapted", names) + charts.steps(before, y, "source")
    was, now = means
    if before and math.isfinite(was):
        word = "Surer than" if now > was + 0.01 else "Less sure than" if now < was - 0.01 else "As sure as"
        title = f"{word} the source network: {percent(was, 0)} → {percent(now, 0)} on average"
    else:
        title = f"{percent(now, 0)} sure on average"
    about = f"histogram of confidence on {images} images"
    return Card(title, charts.chart(marks, x, y, about) + charts.legend(BOTH if before else BOTH[1:]))


def classes(source: Sequence[float], adapted: Sequence[float], names: Sequence[str] | None) -> Card | None:
    """Return how often each class is the answer, before and after."""
    total, before = sum(adapted), sum(source)
    if not total or len(adapted) < 2:
        return None
    order = sorted(range(len(adapted)), key=lambda i: -max(adapted[i] / total, source[i] / before if before else 0))
    if len(order) <= MOST_CLASSES:
        order = list(range(len(adapted)))
    shown = order[:MOST_CLASSES]
    rows = []
    for i in shown:
        bars = [("adapted", adapted[i] / total, percent(adapted[i] / total))]
        if before:
            bars.insert(0, ("source", source[i] / before, percent(source[i] / before)))
        rows.append((_class_name(names, i), bars))
    high = max(value for _, bars in rows for _, value, _ in bars)
    top = max(range(len(adapted)), key=lambda i: adapted[i])
    used = sum(n > 0 for n in adapted)
    share = adapted[top] / total
    if share > 0.5 and len(adapted) > 2:
        title = f"{percent(share, 0)} of the answers are {_class_name(names, top)}"
    else:
        title = (
            f"{used} of {len(adapted)} classes are answered; {_class_name(names, top)} most often, {percent(share, 0)}"
        )
    rest = len(order) - len(shown)
    note = f"The {len(shown)} largest of {len(order)} classes." if rest > 0 else ""
    return Card(title, charts.rows_of_bars(rows, high) + charts.legend(BOTH if before else BOTH[1:]), note)


def reliability(adapted: Reliability, source: Reliability | None) -> Card | None:
    """Return how often answers of each confidence are right."""
    if not sum(adapted.counts):
        return None
    x, y = charts.shares(title="confidence"), charts.shares(title="share of right answers")
    marks = charts.diagonal(x, y)
    for kind, bins in (("source", source), ("adapted", adapted)):
        if bins is not None:
            kept = [(c, a, n) for c, a, n in zip(bins.confidence, bins.accuracy, bins.counts, strict=True) if n]
            names = [f"{n:,} images: {percent(c)} sure, {percent(a)} right" for c, a, n in kept]
            places = [(c, a) for c, a, _ in kept]
            marks += charts.line(places, x, y, kind) + charts.dots(places, x, y, kind, names)
    title = " ".join(reliability_finding(adapted).split())
    keys = [*(BOTH if source is not None else BOTH[1:]), ("even", "as sure as right")]
    note = f"On the dashed line confidence is honest. An ECE below {100 * CALIBRATED:.0f} % is good."
    return Card(title, charts.chart(marks, x, y, "reliability diagram", height=16) + charts.legend(keys), note)


def risks(adapted: Sequence[float], source: Sequence[float] | None) -> Card | None:
    """Return the error among the surest images against how many are answered."""
    if len(adapted) < 2 or not all(map(math.isfinite, adapted)):
        return None
    curves = [("source", source or ()), ("adapted", adapted)]
    _, high = charts.spread([v for _, curve in curves for v in curve], zero=True)
    x, y = charts.shares(title="answered, the surest first"), charts.shares(0, min(1.0, max(high, 0.01)), "error")
    marks = ""
    for kind, curve in curves:
        marks += charts.line([((k + 1) / len(curve), v) for k, v in enumerate(curve)], x, y, kind)
    half, whole = adapted[(len(adapted) - 1) // 2], adapted[-1]
    title = f"Answer the surest half only, and the error falls from {percent(whole)} to {percent(half)}"
    if half >= whole:
        title = f"Confidence says little: {percent(half)} error in the surest half, {percent(whole)} in all"
    keys = charts.legend(BOTH if source else BOTH[1:])
    return Card(title, charts.chart(marks, x, y, "risk against coverage", height=16) + keys)


def domains(rows: Sequence[tuple[str, float, float | None]]) -> Card | None:
    """Return the error on each domain, of the source network too where it is known: (name, adapted, source)."""
    if not rows:
        return None
    bars = []
    for name, after, before in rows:
        parts = [] if before is None else [("source", before, percent(before))]
        bars.append((name, [*parts, ("adapted", after, percent(after))]))
    high = max([v for _, parts in bars for _, v, _ in parts if math.isfinite(v)], default=1.0)
    both = [(name, before - after) for name, after, before in rows if before is not None]
    worst = max(rows, key=lambda row: row[1])
    if len(rows) == 1:
        title = f"{percent(worst[1])} error on {worst[0]}"
    elif both:
        better = sum(gain > 0 for _, gain in both)
        title = f"Better than the source network on {better} of {len(both)} domains"
    else:
        title = f"Worst on {worst[0]}: {percent(worst[1])} error"
    keys = charts.legend(BOTH if both else BOTH[1:])
    return Card(
        title, charts.rows_of_bars(bars, high or 1.0) + keys, "Share of wrong answers; shorter is better.", True
    )


def packs(counts: Mapping[str, int]) -> Card | None:
    """Return how many images each pack answered."""
    total = sum(counts.values())
    if not total:
        return None
    ranked = sorted(counts.items(), key=lambda item: -item[1])
    rows = [
        (name, [("source" if name == "source" else "adapted", n / total, f"{n:,} ({percent(n / total, 0)})")])
        for name, n in ranked[:MOST_CLASSES]
    ]
    name, most = ranked[0]
    title = f"{percent(most / total, 0)} of the images were answered by {name}"
    rest = len(ranked) - len(rows)
    note = (
        f"And {rest} more packs."
        if rest > 0
        else "A pack answers the images of its own domain; the source network, those that fit none."
    )
    return Card(title, charts.rows_of_bars(rows, ranked[0][1] / total), note)


def sigma(rows: Sequence[Sigma]) -> Card | None:
    """Return the noise of each layer, in the network's order."""
    if len(rows) < 2 or not any(math.isfinite(r.relative[0]) for r in rows):
        return None
    x = Axis(0, len(rows) - 1, ((0, "first layer"), (len(rows) - 1, "last")), "")
    _, high = charts.spread([v for r in rows for v in (r.relative[0], r.relative[2])], zero=True)
    _, means = charts.spread([r.relative[0] for r in rows], zero=True)
    y = charts.numbers(0, min(high, 3 * means), "σ / standard deviation of the weights")
    places = [(float(i), r.relative[0]) for i, r in enumerate(rows)]
    marks = charts.band(
        [(i, r.relative[1]) for i, r in enumerate(rows)],
        [(i, r.relative[2]) for i, r in enumerate(rows)],
        x,
        y,
        "adapted",
    )
    names = [f"{r.layer}: {number(r.relative[0])}, {number(r.relative[1])} to {number(r.relative[2])}" for r in rows]
    marks += charts.line(places, x, y, "adapted") + charts.dots(places, x, y, "adapted", names)
    title = " ".join(sigma_finding(rows).split())
    note = "The noise that was learned for each layer's weights, over the spread of these weights."
    keys = charts.legend([("adapted", "mean"), ("adapted area", "range within the layer")])
    return Card(title, charts.chart(marks, x, y, "σ per layer") + keys, note, wide=len(rows) > 24)


def pictures(seen: Recording | None, names: Sequence[str] | None) -> list[Card]:
    """Return the surest and least sure images, and the surest mistakes."""
    kinds = [] if seen is None else [(kind, images) for kind, images in seen.shown.items() if images]
    # The ends of a handful of images are the same ones.
    if seen is not None and seen.adapted.images <= len(seen.shown["surest"]):
        kinds = [(kind, images) for kind, images in kinds if kind != "least sure"]
    return [
        Card(_TITLES[kind], f"<div class=shown>{''.join(_picture(i, names) for i in images)}</div>")
        for kind, images in kinds
    ]


def _picture(image: ShownImage, names: Sequence[str] | None) -> str:
    small = " class=small" if max(image.pixels.shape[:2]) <= 48 else ""
    said = "" if image.label < 0 else _class_name(names, image.label)
    name = f'<b title="{text(said)}">{text(said)}</b>' if said else ""
    verdict = ""
    if image.truth is not None:
        right = image.truth == image.label
        what = "✓ right" if right else f"✗ is {text(_class_name(names, image.truth))}"
        verdict = f"<br><span class={'right' if right else 'wrong'}>{what}</span>"
    where, short = text(image.name), text(image.name.replace("\\", "/").rpartition("/")[2])
    return (
        f'<figure title="{where}"><img{small} alt="{text(said) or "image"}" src="{data_uri(image.pixels)}">'
        f"{name}<span>{percent(image.confidence, 0)} sure</span>{verdict}<small><bdi>{short}</bdi></small></figure>"
    )


def _happened(marks: Sequence[Mark]) -> str:
    last = marks[-FLAGS:]
    rows = "".join(
        f'<li><span class="flag {mark.kind}">{i}</span><time>at image {mark.at:,.0f}</time>'
        f"<span>{text(mark.what)}</span></li>"
        for i, mark in enumerate(last, 1)
    )
    more = f"<p class=note>{len(marks) - FLAGS:,} earlier ones are dashed lines only.</p>" if len(marks) > FLAGS else ""
    return f"<ul class=happened>{rows}</ul>{more}" if rows else ""


def _arrivals(switches: Sequence[tuple[int, str]]) -> list[Mark]:
    """Return where a stream went to another domain after its first."""
    names = [name for _, name in switches]
    return [
        Mark(at, f"back in {name}" if name in names[:number] else f"another domain: {name}", "domain")
        for number, (at, name) in enumerate(switches[1:], 1)
    ]


def times(count: int) -> str:
    """Return how often, in words: "once", "twice", "3 times"."""
    return {1: "once", 2: "twice"}.get(count, f"{count:,} times")


def _strip(switches: Sequence[tuple[int, str]], total: float) -> str:
    """Return which domain the network was in, as a strip below the curve; the last stretches where there are many."""
    if not switches or total <= 0:
        return ""
    if switches[0][0]:  # until the first domain was told apart
        switches = [(0, "…"), *switches]
    ends = [at for at, _ in switches[1:]] + [total]
    parts = [(name, max(0.0, end - at)) for (at, name), end in zip(switches, ends, strict=True)]
    if len(parts) > 40:
        return ""
    inner = "".join(
        f'<i style="flex:{size / total:.4f} 1 0" title="{text(name)}">{text(name)}</i>' for name, size in parts if size
    )
    return f"<div class=strip>{inner}</div>"


def _middle(points: Sequence[CurvePoint], at: int) -> float:
    return sum(p.images for p in points[:at]) + points[at].images / 2


def _value(point: CurvePoint, labelled: bool) -> float:
    over, under = (point.wrong, point.labelled) if labelled else (point.sure, point.answered)
    return over / under if under else math.nan


def _at(mark: Mark) -> float:
    return mark.at


def _class_name(names: Sequence[str] | None, label: int) -> str:
    return names[label] if names is not None and 0 <= label < len(names) else f"class {label}"


def images_until(points: Sequence[CurvePoint]) -> list[tuple[int, int]]:
    """Return batches and images at the end of each stretch of a curve."""
    return list(zip(accumulate(p.batches for p in points), accumulate(p.images for p in points), strict=True))
