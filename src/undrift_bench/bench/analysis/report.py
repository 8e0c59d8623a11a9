"""Tables and figures of the analyses."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from undrift_bench.bench.analysis import figures as drawings
from undrift_bench.bench.analysis import sigma
from undrift_bench.bench.analysis.parts import DRAWS_IN_TEST, TASK, AnalysisPart, Where
from undrift_bench.bench.analysis.run import Planned
from undrift_bench.bench.analysis.scores import Score
from undrift_bench.bench.harness.run import about
from undrift_bench.bench.harness.store import Record, Store
from undrift_bench.bench.harness.table import (
    AURC,
    FAILED,
    NOT_MEASURED,
    NOT_RUN,
    footnotes,
    in_use,
    several_sources,
    size,
)
from undrift_bench.bench.harness.table import markdown as table

TITLES: dict[Where, str] = {"pacs": "PACS", "cifar10-c": "CIFAR-10-C", "cifar100-c": "CIFAR-100-C"}
Points = dict[str, dict[str, Score]]
"""By curve and value."""


def markdown(planned: Sequence[Planned], store: Store) -> str:
    """Return a table a part."""
    text = ["# What each choice of VMP is worth\n", about(store.all(p.cell for p in planned)) + "\n"]
    for part in _parts(planned):
        mine = [p for p in planned if p.part is part]
        header = _header(store.all(p.cell for p in mine))
        lines = [_line(p, store, header) for p in mine] + _draws(part, planned, store, header)
        text += [f"## {part.name}: {part.title}\n", table(header, lines)]
        if part.kind == "sigma":
            text += ["\n" + _layers(p, store) for p in mine if store.finished(p.cell)]
        text += [f"\n{part.note}\n"] if part.note else []
        text += [f"- {p.cell.key} failed: {r['failed']}" for p in mine if (r := store.get(p.cell)) and "failed" in r]
        text += footnotes({p.cell.key: store.all([p.cell]) for p in mine})
    text += several_sources({p.cell.key: [_by_place(record) for record in store.all([p.cell])] for p in planned})
    text.append("- One seed each: a difference of less than a point says nothing. “not run”: there is no such cell.")
    text.append("- ms a batch: where a cell had the machine to itself. Rows' own times: offline.md and online-c10.md.")
    return "\n".join(text) + "\n"


def _by_place(record: Record) -> Record:
    """Return a record whose setting is the task or stream alone: what all parts have in common."""
    return {**record, "setting": record["setting"].split()[-1]}


def figures(planned: Sequence[Planned], store: Store) -> dict[str, Callable[[Path], int]]:
    """Return what draws each part of which something is finished."""
    drawn: dict[str, Callable[[Path], int]] = {}
    for part in _parts(planned):
        mine = [p for p in planned if p.part is part]
        if part.kind == "sigma":
            found = {p.trial.value: record for p in mine if (record := store.finished(p.cell))}
            if found:
                drawn["-sigma"] = partial(sigma.sigma, by_task=found)
            continue
        panels = {TITLES[where]: points for where in TITLES if (points := _points(part, where, planned, store))}
        if part.kind == "lines":  # a line has two ends
            panels = {name: curves for name, curves in panels.items() if max(map(len, curves.values())) > 1}
        if panels and part.kind == "lines":
            drawn[f"-{part.name}"] = partial(drawings.lines, title=part.title, axis=part.axis, panels=panels)
        elif panels:
            drawn[f"-{part.name}"] = partial(drawings.dots, title=part.title, panels=panels)
    return drawn


def _parts(planned: Sequence[Planned]) -> list[AnalysisPart]:
    return list({p.part.name: p.part for p in planned}.values())


def _header(records: Sequence[Record]) -> list[str]:
    scores = ["accuracy %", "NLL", "ECE %", *(column.title for column in in_use([AURC], records))]
    return ["on", "curve", "value", *scores, "source after %", "learnables", "file", "ms a batch", "peak MiB"]


def _line(planned: Planned, store: Store, header: Sequence[str]) -> list[str]:
    trial, record = planned.trial, store.finished(planned.cell)
    task = planned.cell.setting.split()[-1] if trial.where == "pacs" and (trial.task or trial.usual != TASK) else ""
    where = f"{TITLES[trial.where]} {task}".rstrip()
    if record is None:
        state = FAILED if store.state(planned.cell) == "failed" else NOT_RUN
        return [where, trial.curve, trial.value, state, *[""] * (len(header) - 4)]
    after, lost = record.get("source_accuracy"), record.get("source_error_after")
    after = 1 - lost if after is None and lost is not None else after
    kept = NOT_MEASURED if after is None else f"{100 * after:.2f}"
    return [where, trial.curve, trial.value, *_scores(record, header), kept, *_costs(record)]


def _scores(record: Record, header: Sequence[str]) -> list[str]:
    found = [f"{100 * record['accuracy']:.2f}", f"{record['nll']:.3f}", f"{100 * record['ece']:.1f}"]
    return [*found, AURC.text([record])] if AURC.title in header else found


def _costs(record: Record) -> list[str]:
    time, peak = record["milliseconds"], record["peak_mib"]
    costs = ["–" if time is None else f"{time:.1f}", "–" if peak is None else f"{peak:,.0f}"]
    return [f"{record['learnables']:,}", size([record["file_bytes"]]), *costs]


def _looked_into(planned: Sequence[Planned], store: Store) -> tuple[str, Record | None]:
    """Return the record that has the scores by draws in test, part sigma's on its first task, and that task."""
    first = next((p for p in planned if p.part.name == "sigma"), None)
    return ("", None) if first is None else (first.trial.task, store.finished(first.cell))


def _draws(part: AnalysisPart, planned: Sequence[Planned], store: Store, header: Sequence[str]) -> list[list[str]]:
    """Return the lines of draws in test on PACS, which come with part sigma."""
    if part.name != "samples":
        return []
    task, record = _looked_into(planned, store)
    known = {} if record is None else record["by_samples"]
    scores = [_scores(known[str(n)], header) if str(n) in known else [NOT_RUN] for n in DRAWS_IN_TEST]
    lines = [
        [f"{TITLES['pacs']} {task}".strip(), "in test", str(n), *found]
        for n, found in zip(DRAWS_IN_TEST, scores, strict=True)
    ]
    return [line + [""] * (len(header) - len(line)) for line in lines]


def _points(part: AnalysisPart, where: Where, planned: Sequence[Planned], store: Store) -> Points:
    found: Points = {}
    for p in planned:
        record = store.finished(p.cell) if p.part is part and p.trial.where == where else None
        if record is not None:
            name = p.trial.value
            if part.name == "sharing":
                name += f"\n{record['learnables']:,} learnables"
            found.setdefault(p.trial.curve, {})[name] = _score(record)
    task, looked = _looked_into(planned, store) if part.name == "samples" and where == "pacs" else ("", None)
    if looked is not None:
        found[f"in test, {task}"] = {n: _score(scores) for n, scores in looked["by_samples"].items()}
    return found


def _score(record: Record) -> Score:
    return Score(100 * record["accuracy"], record["nll"])


def _layers(planned: Planned, store: Store) -> str:
    record = store.finished(planned.cell)
    assert record is not None, "asked for finished ones only"
    rows = []
    for layer, row in record["sigma"].items():
        numbers = (row["start_l1"], row["l1"], row["start_relative"], row["relative"], record["a_distance"][layer])
        rows.append([layer, f"{row['variances']:,}", *(f"{number:.4g}" for number in numbers)])
    header = ("layer", "variances", "Σσ at the start", "Σσ", "σ/std at the start", "σ/std", "A-distance")
    return f"{planned.trial.value}, rank correlation of A-distance with Σσ, σ/std and the change of σ: " + (
        ", ".join(f"{value:+.2f}" for value in sigma.correlations(record)) + "\n\n" + table(header, rows)
    )
