"""`undrift bench NAME --report` writes a page of what is finished; nothing finished is a whole page, too."""

from pathlib import Path

import pytest

from undrift.cli import main
from undrift_bench.bench import Request
from undrift_bench.bench.harness.run import tables
from undrift_bench.bench.harness.web_page import errors, write_page

from .test_run import Counting, quietly


def test_the_page_shows_the_error_of_each_row(tmp_path: Path) -> None:
    request = Request(results=tmp_path, seeds=2)
    quietly(Counting(), request)
    assert errors(Counting(), request) == {"net, main": {"good": (0.25, 2), "late": (0.25, 1)}}
    size = write_page(tmp_path / "a.html", "counting", Counting(), request, tables(Counting(), request))
    page = (tmp_path / "a.html").read_text()
    assert size == (tmp_path / "a.html").stat().st_size
    assert "good errs least: 25.0 %." in page
    assert "25.0 %, 2 seeds" in page


def test_nothing_finished_is_a_page_too(tmp_path: Path) -> None:
    words = ["bench", "online-imagenet", "--tiny", "--tables", "--results", str(tmp_path), "--quiet"]
    assert main([*words, "--report", str(tmp_path / "a.html")]) == 0
    assert "Nothing of this benchmark has an error to show yet." in (tmp_path / "a.html").read_text()


@pytest.mark.parametrize("words", [["online-imagenet", "--tiny", "--list"], []])
def test_a_page_of_nothing_is_refused(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words, "--report", str(tmp_path / "a.html")]) == 2
    assert "nothing that has a page; needed: a benchmark" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
