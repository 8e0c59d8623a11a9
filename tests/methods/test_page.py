"""docs/methods.md shows the methods as they are, and names whom they are by."""

import re
import runpy
from pathlib import Path

import pytest

from undrift.methods import METHODS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "methods.md").read_text(encoding="utf-8")


def test_the_table_is_current() -> None:
    made = runpy.run_path(str(DOCS / "make_methods.py"))["page"]
    assert made(PAGE) == PAGE
    assert all(f"| `{name}` |" in PAGE for name in METHODS)


def test_a_table_that_is_not_current_is_replaced() -> None:
    made = runpy.run_path(str(DOCS / "make_methods.py"))["page"]
    assert made(PAGE.replace("| `tent` |", "| `tant` |")) == PAGE


@pytest.mark.parametrize("reference", sorted({r for m in METHODS.values() for r in m.reference.split("; ")} - {"–"}))
def test_whom_a_method_is_by_is_among_the_references(reference: str) -> None:
    listed = PAGE.partition("## References")[2]
    first, year = re.match(r"\w+", reference), re.search(r"\d{4}( \(\w+\))?", reference)
    assert first is not None
    assert year is not None
    assert re.search(rf"^- {first[0]}\b[^\n]* {re.escape(year[0])}\.", listed, re.MULTILINE)
