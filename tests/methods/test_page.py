"""docs/reference/methods.md shows the methods as they are, and names whom they are by."""

import re
import runpy
from pathlib import Path

import pytest
import torch

import undrift
from support import convnet, images, snapshot
from undrift.methods import METHODS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "reference" / "methods.md").read_text(encoding="utf-8")


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


@pytest.mark.filterwarnings("ignore:.*untrained:undrift.UndriftWarning")
@pytest.mark.parametrize(
    ("name", "in_the_stream", "afterwards"),
    [
        ("vmp", True, True),
        ("bbb", True, True),
        ("vmp-roid", False, True),
        ("vmp:released", False, True),
        ("bacs", False, False),
        ("tent", False, False),
    ],
)
def test_which_answers_have_mutual_information(name: str, in_the_stream: bool, afterwards: bool) -> None:
    settings = {"init_fraction": 0.04} if afterwards else {}  # the released σ is next to nothing
    going = undrift.stream(convnet(), [images(12)], method=name, **settings)
    answer, later = next(going), undrift.predict(going.model, images(12), samples=10)
    assert [float(p.mutual_info.max()) > 1e-6 for p in (answer, later)] == [in_the_stream, afterwards]


def test_what_is_trained_is_said_by_the_scheme_and_not_by_requires_grad() -> None:
    for settings, moved in (({}, True), ({"frozen": "0"}, False)):
        net = convnet()
        net[0].requires_grad_(False)  # type: ignore[index]
        before = snapshot(net)
        going = undrift.stream(net, [images(12)], method="tent-ft", stream_lr=0.01, **settings)
        list(going)
        assert (not torch.equal(net[0].weight, before["0.weight"])) == moved  # type: ignore[index, arg-type]
        assert going.remove() is net
        assert not net[0].weight.requires_grad  # type: ignore[index, union-attr]
        assert net[8].weight.requires_grad  # type: ignore[index, union-attr]
