"""The pages of an adaptation, a stream and an evaluation. Each works with whatever data there is."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from undrift.judge.findings import has_risks, mean_risks, pooled, target_names
from undrift.judge.metrics import Reliability, Tally
from undrift.judge.page import cards
from undrift.judge.page.charts import Mark
from undrift.judge.page.document import Card, Headline, Tone, render
from undrift.judge.page.markup import number, percent
from undrift.judge.page.recording import Recording
from undrift.packs.domain_file import sigmas
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.table import totals

if TYPE_CHECKING:
    from undrift.judge.accuracy import Helping
    from undrift.judge.history import History
    from undrift.judge.report import Report, Result

ERROR = "Share of wrong answers, counted with labels."
ESTIMATED = "Share of right answers, estimated without labels"
_KINDS = {"domain changed": "domain", "went back": "acted", "source answers": "acted"}
"""What the page takes events of a stream for; all others are notes."""

SURENESS = "Mean confidence of the answers. It is not accuracy: without labels it is unknown how many are right."


def of_history(history: "History", seen: Recording | None = None, tallies: tuple[Tally, Tally] | None = None) -> str:
    """Return the page of an adaptation.

    Args:
        seen: both networks' answers to some of its images.
        tallies: their scores, of the source and of the adapted network, where there are labels.
    """
    model, verdict = history.model, history.verdict
    names = None if model is None else model.classes
    images = verdict.after.samples if verdict is not None else 0
    facts = [
        ("images", number(images) if images else ""),
        ("epochs", number(len(history.epochs))),
        ("steps", number(len(history.steps))),
        *_network(model),
    ]
    trouble = [
        (history.bad_images, f"{len(history.bad_images):,} images with NaN or infinity were skipped."),
        (history.bad_steps, f"{history.bad_steps:,} steps were not made, as loss or gradient was not finite."),
        (verdict is not None and verdict.put_back, "The source network was put back: it answers as it did before."),
    ]
    scored = None if tallies is None else _scored(tallies)
    shown = [
        *(scored or ()),
        None if seen is None else _confidence(seen.source, seen.same),
        None if seen is None else cards.classes(seen.source.classes, seen.same.classes, names),
        cards.training(history.steps, history.epochs, history.kept_epoch),
        None if model is None else cards.sigma(sigmas(model)),
        *cards.pictures(seen, names),
    ]
    helping = None if verdict is None else verdict.helping
    errors = None if tallies is None else (tallies[0].scores().error, tallies[1].scores().error)
    headline = _headline(errors, 0 if tallies is None else tallies[1].scores().count, helping, seen)
    if verdict is not None and verdict.collapsed:
        headline = _collapsed(headline)
    elif verdict is not None and errors is None and helping is None:
        headline = _by_verdict(headline, str(verdict))
    elif verdict is not None and errors is None and not str(verdict).startswith("no sign of collapse"):
        judgement = str(verdict).partition(": ")[0]
        headline = _with_lead(headline, f"{judgement[:1].upper()}{judgement[1:]}.")
    lead = " ".join(what for found, what in trouble if found)
    said = [("The label-free verdict", "" if verdict is None else f"{verdict}"), ("The run in numbers", str(history))]
    options = None if model is None else model.options.as_dict()
    return render("adaptation", _with_lead(headline, lead), facts, shown, said, options)


def of_stream(
    report: Any,
    model: Perturbed,
    seen: Recording | None = None,
    switches: Sequence[tuple[int, str]] = (),
    helping: "Helping | None" = None,
) -> str:
    """Return the page of a stream.

    Args:
        report: its counts and events (`Stream.report`).
        switches: at which images it went to which domain.
        helping: the estimate of accuracies without labels, if there is one.
    """
    names, error = model.classes, math.nan if seen is None else seen.error()
    facts = [
        ("images", number(report.images)),
        ("batches", number(report.batches)),
        ("steps", number(report.steps)),
        ("domains met", number(len({name for _, name in switches})) if switches else ""),
        *_network(model),
    ]
    marks = marks_of(report, seen, known=bool(switches))
    shown = [
        cards.over_time(seen, marks, switches),
        None if seen is None else _confidence(seen.source, seen.same if seen.source.images else seen.adapted),
        None if seen is None else cards.classes(seen.source.classes, seen.adapted.classes, names),
        None if seen is None else cards.packs(seen.packs),
        cards.sigma(sigmas(model)),
        *cards.pictures(seen, names),
    ]
    headline = _headline(None, 0, helping, seen)
    acted = len([mark for mark in marks if mark.kind == "acted"])
    if helping is None:
        went = f"{report.images:,} images answered" if report.images else "No image has come yet"
        if acted:
            what = f"the guard acted {cards.times(acted)}"
            headline = _replaced(headline, tone="warn", pill="protected itself", sentence=f"{went}; {what}.")
        elif report.images:
            headline = _replaced(headline, tone="good", pill="nothing broke", sentence=f"{went}, and nothing broke.")
        else:
            headline = _replaced(headline, tone="plain", pill="waiting", sentence=f"{went}.")
    if math.isfinite(error):
        headline = _replaced(headline, before="", after=percent(error), what=ERROR)
    trouble = [
        (acted and helping is not None, f"The guard acted {cards.times(acted)}."),
        (report.skipped, f"{report.skipped:,} images with NaN or infinity were skipped."),
        (report.missed, f"{report.missed:,} batches were answered without a step."),
    ]
    lead = " ".join(what for found, what in trouble if found)
    said = [("What was counted", str(report))]
    return render("stream", _with_lead(headline, lead), facts, shown, said, model.options.as_dict())


def of_report(report: "Report", seen: Recording | None = None, source: "Report | None" = None) -> str:
    """Return the page of an evaluation.

    Args:
        seen: the answers, as `evaluate(…, watch=seen.add)` collects them.
        source: the report of the source network on the same images, to compare with.
    """
    target, summary = report.of("target"), report.summary
    before = None if source is None else {(r.task, r.domain): r for r in source.of("target")}
    rows = [
        (name, r.scores.error, _error_before(before, r)) for name, r in zip(target_names(report), target, strict=True)
    ]
    known = [r for *_, r in rows if r is not None]
    errors = (sum(known) / len(known), summary["error"]) if known and len(known) == len(rows) else None
    names = None if seen is None else seen.classes
    bins = _pooled([r.reliability for r in target])
    bins_before = None if source is None else _pooled([r.reliability for r in source.of("target")])
    sure, was = _sureness(bins), _sureness(bins_before)
    counts = (list(bins_before.counts) if bins_before else [], list(bins.counts) if bins else [])
    images = sum(r.scores.count for r in target)
    shown = [
        cards.domains(rows) if len(rows) > 1 or errors else None,
        None if seen is None or len(rows) < 2 else cards.over_time(seen, _borders(target)),
        None if bins is None else cards.reliability(bins, bins_before),
        cards.risks(mean_risks(report), mean_risks(source) if source and has_risks(source) else None)
        if has_risks(report)
        else None,
        cards.confidence(*counts, (was, sure), number(images)),
        None if seen is None else cards.classes([], seen.adapted.classes, names),
        None if seen is None else cards.packs(seen.packs),
        *cards.pictures(seen, names),
    ]
    headline = _headline(errors, images, None, None)
    if errors is None:
        over = f" on average over {len(rows)} domains" if len(rows) > 1 else f" on {rows[0][0]}"
        sentence = f"{percent(summary['error'])} of the answers are wrong{over}."
        headline = Headline("plain", "evaluated", sentence, "", percent(summary["error"]), ERROR)
    lead = ""
    if "forgetting" in summary:
        lead = f"On the source domain the error changed by {100 * summary['forgetting']:+.1f} points meanwhile."
    elif "mean_of_harmonics" in summary:
        lead = (
            f"Source accuracy {percent(summary['source_accuracy'])}, target accuracy "
            f"{percent(summary['target_accuracy'])}; harmonic mean {percent(summary['mean_of_harmonics'])}."
        )
    facts = [
        ("images", number(images)),
        ("domains", number(len(rows)) if len(rows) > 1 else ""),
        ("calibration error (ECE)", percent(summary["ece"])),
        ("AURC × 100", number(100 * summary["aurc"]) if "aurc" in summary else ""),
        ("network", str(report.about.get("network", ""))),
        ("draws per answer", str(report.about.get("samples", ""))),
    ]
    said = [("Every score", str(report)), ("Every score of the source network", "" if source is None else str(source))]
    return render(f"{report.setting} evaluation", _with_lead(headline, lead), facts, shown, said, dict(report.about))


def marks_of(report: Any, seen: Recording | None, known: bool = False) -> list[Mark]:
    """Return what happened in a stream, by images: what it noticed and did by itself, and resets that were not told.

    Args:
        known: whether changes of domain are shown already, as a stream with packs names them.
    """
    events = report.events
    marks = [
        Mark(float(e.images), f"{e.kind}: {e.why}" if e.why else e.kind, _KINDS.get(e.kind, "note")) for e in events
    ]
    marks = [mark for mark in marks if not (known and mark.kind == "domain")]
    ends = [(0, 0), *(cards.images_until(seen.curve) if seen is not None else [(report.batches, report.images)])]
    untold = [(batch, why) for batch, why in report.resets_at if not any(why in e.why for e in events)]
    return marks + [Mark(_images_at(batch, ends), f"back to the start: {why}", "acted") for batch, why in untold]


def _images_at(batch: int, ends: Sequence[tuple[int, int]]) -> float:
    """Return about how many images had come before a batch."""
    for (low, first), (high, last) in pairwise(ends):
        if batch <= high:
            return first + (last - first) * (batch - low) / max(1, high - low)
    return float(ends[-1][1])


def _headline(
    errors: tuple[float, float] | None, images: int, helping: "Helping | None", seen: Recording | None
) -> Headline:
    """Return the headline by what is known: labels, else an estimate, else confidence alone."""
    if errors is not None:
        return _by_labels(*errors, images)
    if helping is not None:
        judgement = str(helping.judgement)
        points = helping.gain.points
        tones: Mapping[str, tuple[Tone, str, str]] = {
            "helped": ("good", "probably helped", f"Adaptation helped, by our estimate ({points})."),
            "hurt": ("bad", "probably hurt", f"Adaptation hurt, by our estimate ({points})."),
        }
        tone, pill, sentence = tones.get(
            judgement, ("plain", "unclear", f"It is unclear whether adaptation helped ({points}).")
        )
        what = f"{ESTIMATED}: give or take {100 * helping.adapted.error:.0f} points, on {helping.images:,} images."
        doubts = "; ".join(helping.doubts)
        lead = f"Mind that {doubts}." if doubts else ""
        before, after = percent(helping.source.value, 0), percent(helping.adapted.value, 0)
        return Headline(tone, pill, sentence, before, after, what, lead)
    if seen is not None and seen.source.images:
        before, after = percent(seen.source.mean_confidence, 0), percent(seen.same.mean_confidence, 0)
        return Headline("plain", "adapted", "The network was adapted.", before, after, SURENESS)
    if seen is not None and seen.adapted.images:
        after = percent(seen.adapted.mean_confidence, 0)
        return Headline("plain", "adapted", "The network was adapted.", "", after, SURENESS)
    return Headline("plain", "adapted", "The network was adapted.")


def _by_labels(before: float, after: float, images: int) -> Headline:
    """Return the headline where labels were counted; a difference within two standard errors is called chance."""
    gain = 100 * (before - after)
    # As if each network had images of its own: of the same images the true error is smaller, so this is careful.
    chance = 100 * math.sqrt(sum(error * (1 - error) for error in (before, after)) / max(1, images))
    points = f"{abs(gain):.1f} points {'fewer' if gain > 0 else 'more'} errors"
    tone: Tone = "plain"
    if abs(gain) < 0.005:
        pill, sentence = "no change", "Adaptation changed nothing."
    elif abs(gain) <= 2 * chance:
        pill, sentence = "no clear change", f"{points[:1].upper()}{points[1:]}, which may be chance."
    elif gain > 0:
        tone, pill, sentence = "good", "helped", f"Adaptation helped: {points}."
    else:
        tone, pill, sentence = "bad", "hurt", f"Adaptation hurt: {points}."
    return Headline(tone, pill, sentence, percent(before), percent(after), f"{ERROR} {images:,} images.")


def _by_verdict(headline: Headline, verdict: str) -> Headline:
    judgement, _, facts = verdict.partition(": ")
    first = judgement.partition(",")[0]
    tone: Tone = "good" if judgement.startswith("no sign of collapse") else "warn"
    sentence = "No sign of collapse." if tone == "good" else f"{judgement[:1].upper()}{judgement[1:]}."
    lead = f"{facts[:1].upper()}{facts[1:]}" if facts and not headline.after else ""
    return _replaced(
        headline, tone=tone, pill=first if len(first) < 24 else "look closer", sentence=sentence, lead=lead
    )


def _collapsed(headline: Headline) -> Headline:
    sentence = "The network collapsed: it gives almost every image the same answer."
    lead = "Do not use it unless nearly all images truly are of so few classes."
    return _replaced(headline, tone="bad", pill="collapsed", sentence=sentence, lead=lead)


def _replaced(headline: Headline, **values: Any) -> Headline:
    return Headline(**{**vars(headline), **values})


def _with_lead(headline: Headline, more: str) -> Headline:
    return _replaced(headline, lead=" ".join(filter(None, (headline.lead, more))))


def _network(model: Perturbed | None) -> list[tuple[str, str]]:
    if model is None:
        return []
    learned = totals(model).learnables
    return [("network", type(model.net).__name__), ("learned numbers", number(learned))]


def _scored(tallies: tuple[Tally, Tally]) -> list[Card | None]:
    source, adapted = tallies
    return [
        cards.reliability(adapted.reliability(), source.reliability()),
        cards.risks(adapted.risks(), source.risks()),
    ]


def _confidence(source: Any, adapted: Any) -> Card | None:
    means = (source.mean_confidence, adapted.mean_confidence)
    return cards.confidence(
        source.confidence if source.images else [], adapted.confidence, means, number(adapted.images)
    )


def _error_before(before: "Mapping[tuple[str, str], Result] | None", result: "Result") -> float | None:
    found = None if before is None else before.get((result.task, result.domain))
    return None if found is None else found.scores.error


def _pooled(bins: Sequence[Reliability]) -> Reliability | None:
    return pooled(bins) if bins and any(sum(b.counts) for b in bins) else None


def _sureness(bins: Reliability | None) -> float:
    if bins is None:
        return math.nan
    return sum(n * c for n, c in zip(bins.counts, bins.confidence, strict=True)) / sum(bins.counts)


def _borders(results: "Sequence[Result]") -> list[Mark]:
    """Return where each domain of a stream begins."""
    out, done = [], 0
    for result in results:
        if done:
            out.append(Mark(done, f"{result.domain} begins", "domain"))
        done += result.scores.count
    return out
