"""`table1`: what each method can do and needs, as in the paper's Table 1, from the methods' attributes."""

import json
from typing import Any

from undrift import methods
from undrift.recipes.method import Method
from undrift.system.atomic import write_text
from undrift_bench.bench.harness import published
from undrift_bench.bench.harness.request import Request
from undrift_bench.bench.harness.run import Outcome, Say
from undrift_bench.bench.harness.table import markdown

HEADER = ("method", "reference", "source-free", "online", "uncertainty", "adaptation scheme", "extra requirement")


def capabilities(method: Method) -> tuple[bool, bool, bool, str, str]:
    """Return the five columns of a method.

    Examples:
        >>> capabilities(methods.get("vmp"))
        (True, True, True, 'Perturbations', '')
    """
    options = method.options
    parts = {"Conv + FC": bool(options.train), "Perturbations": bool(options.layers)}
    scheme = " + ".join(name for name, on in parts.items() if on) or "–"
    return method.source_free, method.online, method.uncertainty, scheme, method.needs


def rows() -> list[dict[str, Any]]:
    """Return one row a method, with the paper's own row beside it where it has one."""
    found = []
    for name in methods.names():
        method = methods.get(name)
        ours = dict(zip(HEADER[2:], capabilities(method), strict=True))
        paper = dict(zip(HEADER[2:], published.TABLE1[name], strict=True)) if name in published.TABLE1 else None
        # A requirement may be worded otherwise; what counts there is whether there is one.
        differs = [
            column
            for column, said in (paper or {}).items()
            if (bool(ours[column]) != bool(said) if column == HEADER[-1] else ours[column] != said)
        ]
        about = {"method": name, "title": method.title, "reference": method.reference}
        found.append({**about, **ours, "paper": paper, "differs": differs})
    return found


def text(found: list[dict[str, Any]]) -> str:
    """Return the table as Markdown; where the paper says otherwise, its word stands in brackets."""

    def cell(row: dict[str, Any], column: str) -> str:
        said = f" (paper: {_word(row['paper'][column])})" if column in row["differs"] else ""
        return _word(row[column]) + said

    lines = [[row["title"], row["reference"], *(cell(row, column) for column in HEADER[2:])] for row in found]
    run = {row["method"] for row in found}
    missing = [
        f"- {name}: in the paper's table, not among the methods." for name in published.TABLE1 if name not in run
    ]
    note = (
        "Generated from the methods' attributes. “–” under adaptation scheme: norm layers alone, or nothing. Rows that "
        f"{published.PAPER} prints: {', '.join(name for name in published.TABLE1 if name in run)}; where it says "
        "otherwise than we do, its word stands in brackets."
    )
    return "\n".join(["# What each method can do, and needs\n", markdown(HEADER, lines), note, *missing]) + "\n"


def benchmark(request: Request, say: Say) -> Outcome:  # noqa: ARG001  as every benchmark without cells
    """Write table1.json and table1.md."""
    found = rows()
    request.results.mkdir(parents=True, exist_ok=True)
    outcome = Outcome(text=text(found))
    for ending, content in ((".json", json.dumps(found, indent=1, ensure_ascii=False) + "\n"), (".md", outcome.text)):
        outcome.wrote.append(request.results / f"table1{ending}")
        write_text(outcome.wrote[-1], content)
    return outcome


def _word(value: bool | str) -> str:
    return value or "–" if isinstance(value, str) else "yes" if value else "no"
