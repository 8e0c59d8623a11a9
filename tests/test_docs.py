"""The documentation is true: examples run and print what is shown, links resolve, generated pages are current."""

import re
import runpy
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
PAGES = [*DOCS, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "NOTES.md"]
README_LINES = 130


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return the language and the text of each fenced block."""
    return re.findall(r"^```(\w+)\n(.*?)^```", read(page), re.MULTILINE | re.DOTALL)


def headings(page: Path) -> set[str]:
    """Return the anchors of a page, as GitHub and the site make them from its headings."""
    text = re.sub(r"^```.*?^```", "", read(page), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


# The examples' networks are untrained, or see random images.
@pytest.mark.filterwarnings("ignore:COLLAPSED:undrift.UndriftWarning")
@pytest.mark.filterwarnings("ignore:.* of neighbouring images:undrift.UndriftWarning")
@pytest.mark.parametrize("page", [p for p in DOCS if "```python" in read(p)], ids=name)
def test_examples_run_and_print_what_the_page_shows(
    page: Path, inside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    namespace: dict[str, object] = {"__name__": page.stem}
    found = blocks(page)
    for (language, text), (following, shown) in pairwise([*found, ("", "")]):
        if language == "python":
            exec(compile(text, page.name, "exec"), namespace)
            printed = capsys.readouterr().out
            if following == "text":
                assert_alike(printed, shown)


def assert_alike(printed: str, shown: str) -> None:
    """Compare words exactly, and numbers to a few per cent: rounding differs between machines."""
    number = r"\d+(?:\.\d+)?"
    assert re.split(number, printed) == re.split(number, shown)
    pairs = zip(re.findall(number, printed), re.findall(number, shown), strict=True)
    assert all(float(ours) == pytest.approx(float(theirs), rel=0.05, abs=0.02) for ours, theirs in pairs)


def test_the_readme_shows_the_output_of_its_example() -> None:
    languages = [language for language, _ in blocks(ROOT / "README.md")]
    assert ("python", "text") in list(pairwise(languages))


def test_the_readme_is_short() -> None:
    assert len(read(ROOT / "README.md").splitlines()) <= README_LINES


def test_the_options_page_is_current() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "make_options.py"))["page"]
    assert read(ROOT / "docs" / "reference" / "options.md") == page(), "run python docs/make_options.py"


def test_the_methods_page_is_current() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "make_methods.py"))["page"]
    text = read(ROOT / "docs" / "reference" / "methods.md")
    assert page(text) == text, "run python docs/make_methods.py"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", read(page)):
        place, _, anchor = target.partition("#")
        if "//" in target:
            continue
        found = page.parent / place if place else page
        assert found.exists(), target
        assert not anchor or anchor in headings(found), target


@pytest.mark.parametrize("page", [p for p in DOCS if p.name != "README.md"], ids=name)
def test_every_page_is_in_the_navigation(page: Path) -> None:
    path = page.relative_to(ROOT / "docs").as_posix()
    assert re.search(rf"[ :]{re.escape(path)}$", read(ROOT / "mkdocs.yml"), re.MULTILINE), f"add {path} to mkdocs.yml"
