"""The scores of an evaluation: prints as a table, saves as JSON, plots."""

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from undrift._errors import DataError
from undrift.judge.metrics import Reliability, Scores, harmonic_mean
from undrift.system.atomic import write_text

if TYPE_CHECKING:
    from undrift.judge.page.recording import Recording

Setting = Literal["offline", "generalized", "continual"]
Role = Literal["target", "source", "source before"]
VERSION = 1
AURC = "AURC × 100"


@dataclass(frozen=True)
class Result:
    """The scores on one domain.

    Attributes:
        domain: its name.
        scores: error, NLL, Brier, ECE, AURC, AUGRC.
        reliability: the bins of its reliability diagram.
        role: "target"; "source": held-out source images, under the adapted network; "source before": the same under
            the network as it was before.
        task: which adaptation it belongs to, if there are several.
        risks: the share of wrong answers among the surest 2 %, 4 %, …, 100 %; empty in reports saved without it.
        metrics: the values of the metrics that `evaluate` was given, by name; a tuple where there is one per class.
    """

    domain: str
    scores: Scores
    reliability: Reliability
    role: Role = "target"
    task: str = ""
    risks: tuple[float, ...] = ()
    metrics: Mapping[str, float | tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """All results of one evaluation. Fractions inside, per cent where it prints.

    Each result has error, NLL, Brier, ECE and how well confidence sorts right from wrong: AURC and AUGRC, the areas
    under the risk–coverage curve and its generalised form. Printed tables have 100 times AURC.

    Attributes:
        setting: "offline", "generalized" or "continual".
        results: one per domain, in order.
        about: what was evaluated and how (samples, temperature, versions).
    """

    setting: Setting
    results: tuple[Result, ...]
    about: Mapping[str, Any] = field(default_factory=dict)

    def of(self, role: Role, task: str | None = None) -> list[Result]:
        """Return the results in one role, of one task if it is named."""
        return [r for r in self.results if r.role == role and task in (None, r.task)]

    @property
    def tasks(self) -> list[str]:
        """The names of the tasks, each once, in order."""
        return list(dict.fromkeys(r.task for r in self.results))

    def harmonic(self, task: str) -> float:
        """Return the harmonic mean of source and target accuracy in one task: 2·S·T / (S + T)."""
        return harmonic_mean([_mean(self.of(role, task), "accuracy") for role in ("source", "target")])

    @property
    def summary(self) -> dict[str, float]:
        """The numbers that tables are made of; means over domains or tasks, each counting once, whatever its size."""
        target = self.of("target")
        out = {name: _mean(target, name) for name in ("error", "nll", "brier", "ece")}
        out |= {name: _mean(target, name) for name in ("aurc", "augrc", "miou") if _has(target, name)}
        out |= {name: sum(values) / len(values) for name, values in _own(target).items()}
        if self.setting == "generalized":
            source, both = _mean(self.of("source"), "accuracy"), [self.harmonic(t) for t in self.tasks]
            out |= {"source_accuracy": source, "target_accuracy": 1 - out["error"]}
            out["mean_of_harmonics"] = sum(both) / len(both)
            out["harmonic_of_means"] = harmonic_mean([source, out["target_accuracy"]])
        after, before = self.of("source"), self.of("source before")
        if self.setting == "continual" and after:
            out["source_error_after"] = _mean(after, "error")
            if before:
                out["source_error_before"] = _mean(before, "error")
                out["forgetting"] = out["source_error_after"] - out["source_error_before"]
        return out

    def __str__(self) -> str:
        text = _generalized(self) if self.setting == "generalized" else _by_domain(self)
        unanswered = sum(r.scores.unanswered for r in self.results)
        return text + (f"\n{unanswered:,} images got no answer (NaN) and count as wrong" if unanswered else "")

    __repr__ = __str__  # what a notebook shows

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain JSON values, the summary too."""
        return {"undrift_report": VERSION, **dataclasses.asdict(self), "summary": self.summary}

    def save(self, path: str | os.PathLike[str]) -> int:
        """Write the report as JSON, whole or not at all, and return its size in bytes."""
        text = json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False)
        try:
            text.encode()
        except UnicodeEncodeError:  # a folder's name that is not UTF-8 becomes \udc…, which `load` reads back
            text = json.dumps(self.to_dict(), indent=1, allow_nan=False)
        return write_text(path, text + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Report":
        """Return the report that `save` wrote."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            if values["undrift_report"] != VERSION or values["setting"] not in get_args(Setting):
                raise ValueError(f"report {values['undrift_report']!r} of setting {values['setting']!r}")
            return cls(values["setting"], tuple(_result(r) for r in values["results"]), values["about"])
        except OSError as error:
            raise DataError(
                f"{path} cannot be read ({error.strerror or error}); needed: a report of undrift. Check the path."
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(
                f"{path} is no report ({type(error).__name__}: {error}); needed: JSON as report.save writes it, "
                f"version {VERSION}. Run the evaluation again."
            ) from error

    def page(
        self, path: str | os.PathLike[str], seen: "Recording | None" = None, *, source: "Report | None" = None
    ) -> int:
        """Write an HTML page about the evaluation, whole or not at all, and return its size in bytes.

        Args:
            seen: the answers, of which the page shows a few images: `evaluate(…, watch=seen.add)` collects them.
            source: the report of the source network on the same images, to compare with.
        """
        from undrift.judge.page.document import write
        from undrift.judge.page.pages import of_report

        return write(path, of_report(self, seen, source))

    def plot(self, path: str | os.PathLike[str]) -> int:
        """Draw the domains, the reliability diagram and risk against coverage; return the PNG's size in bytes."""
        from undrift.judge import plots

        return plots.report(self, path)


def join(reports: Iterable[Report]) -> Report:
    """Return one report of several: the tasks of a generalized table, or several domains."""
    given = list(reports)
    if not given or len({r.setting for r in given}) != 1:
        found = ", ".join(r.setting for r in given) or "nothing"
        raise DataError(f"{found} cannot be joined; needed: reports of one setting. Join each setting separately.")
    keys = [(x.task, x.role, x.domain) for r in given for x in r.results]
    if len(set(keys)) < len(keys):
        twice = next(k for k in keys if keys.count(k) > 1)
        named = " / ".join(filter(None, twice))
        raise DataError(f"{named} is in two of the reports; needed: names that differ. Give each a task= or name.")
    return Report(given[0].setting, tuple(x for r in given for x in r.results), given[0].about)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], rule_before: Iterable[int] = (0,)) -> str:
    """Return an aligned text table: first column left, others right, a rule before the rows named."""
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]
    lines = [
        "  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))).rstrip()
        for line in (header, *rows)
    ]
    rule = "─" * (sum(widths) + 2 * (len(widths) - 1))
    for at in sorted(rule_before, reverse=True):
        lines.insert(at + 1, rule)
    return "\n".join(lines)


def _by_domain(report: Report) -> str:
    target, summary = report.of("target"), report.summary
    own = _own(target)
    rows = [[*_row(" / ".join(filter(None, (r.task, r.domain))), r.scores), *_numbers(r.metrics, own)] for r in target]
    rules = [0]
    if len(target) > 1:
        rules.append(len(rows))
        rows.append(["mean", "", _percent(summary["error"]), *_rest(summary), *_numbers(summary, own)])
    source = [("before", r) for r in report.of("source before")] + [("after", r) for r in report.of("source")]
    if source:
        rules.append(len(rows))
        rows += [[*_row(f"{r.domain}, {when}", r.scores), *_numbers(r.metrics, own)] for when, r in source]
    header = ["domain", "images", "error %", "NLL", "Brier", "ECE %", AURC]
    if "miou" in summary:
        header[1], header[7:] = "pixels", ["mIoU %"]
    header += own
    text = table(header, rows, rules)
    if "forgetting" in summary:
        change = 100 * summary["forgetting"]
        text += f"\nforgetting: {change:+.2f} points of error on the source domain after the stream"
    return text


def _generalized(report: Report) -> str:
    rows = [
        [
            task or "source → target",
            *(_percent(_mean(report.of(role, task), "accuracy")) for role in ("source", "target")),
            _percent(report.harmonic(task)),
            f"{_mean(report.of('target', task), 'nll'):.3f}",
            _percent(_mean(report.of("target", task), "ece")),
            _percent(_mean(report.of("target", task), "aurc") if _has(report.of("target", task), "aurc") else None),
        ]
        for task in report.tasks
    ]
    rules, summary = [0], report.summary
    if len(rows) > 1:
        rules.append(len(rows))
        means = [_percent(summary[k]) for k in ("source_accuracy", "target_accuracy", "mean_of_harmonics")]
        rows.append(["mean", *means, f"{summary['nll']:.3f}", _percent(summary["ece"]), _percent(summary.get("aurc"))])
        rows.append(["harmonic mean of the means", "", "", _percent(summary["harmonic_of_means"]), "", "", ""])
    return table(("task", "source %", "target %", "harmonic %", "NLL", "ECE %", AURC), rows, rules)


def _row(name: str, scores: Scores) -> list[str]:
    return [name, f"{scores.count:,}", _percent(scores.error), *_rest(dataclasses.asdict(scores))]


def _rest(values: Mapping[str, Any]) -> list[str]:
    rest = [f"{values['nll']:.3f}", f"{values['brier']:.3f}", _percent(values["ece"]), _percent(values.get("aurc"))]
    return rest if values.get("miou") is None else [*rest, _percent(values["miou"])]


def _own(results: Sequence[Result]) -> dict[str, list[float]]:
    """Return the metrics that are one number on each of the results, by name."""
    names = results[0].metrics if results else ()
    values = {name: [r.metrics.get(name) for r in results] for name in names}
    return {name: found for name, v in values.items() if len(found := [x for x in v if isinstance(x, float)]) == len(v)}


def _numbers(values: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    return [f"{values[name]:.3f}" if name in values else "–" for name in names]


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f}"


def _has(results: Sequence[Result], name: str) -> bool:
    return all(getattr(r.scores, name) is not None for r in results)


def _mean(results: Sequence[Result], name: str) -> float:
    if not results:
        raise DataError(f"the report has no results to take the mean {name} of; needed: at least one. Evaluate first.")
    return float(sum(getattr(r.scores, name) for r in results) / len(results))


def _result(values: Mapping[str, Any]) -> Result:
    if values["role"] not in get_args(Role):
        raise ValueError(f"role {values['role']!r}")
    reliability = Reliability(**{k: tuple(v) for k, v in values["reliability"].items()})
    risks = tuple(values.get("risks", ()))
    metrics = {k: tuple(v) if isinstance(v, list) else v for k, v in values.get("metrics", {}).items()}
    scores = Scores(**values["scores"])
    return Result(values["domain"], scores, reliability, values["role"], values["task"], risks, metrics)
