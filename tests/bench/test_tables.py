"""Published numbers add up, Table 1 follows from the methods, and the command line leads to all of it."""

import json
import runpy
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import undrift
from undrift import methods
from undrift.cli import main
from undrift_bench.bench import NAMES, Request, Store, find
from undrift_bench.bench.harness import published
from undrift_bench.bench.harness.figure import BarMark, finding, lines
from undrift_bench.bench.harness.notes import not_source_free
from undrift_bench.bench.harness.table import markdown, size, spread
from undrift_bench.bench.online.benchmark import OnlineBenchmark
from undrift_bench.bench.table1 import capabilities, rows
from undrift_bench.bench.table1 import text as table1

ROOT = Path(__file__).parents[2]


EXPLANATION = ROOT / "docs" / "explanation"
SCRIPT = runpy.run_path(str(ROOT / "benchmarks" / "readme.py"))
PAGES: dict[str, dict[str, object]] = SCRIPT["BLOCKS"]


@pytest.fixture(scope="module")
def readme() -> Callable[[list[str]], int]:
    """What `python benchmarks/readme.py` runs."""
    found: Callable[[list[str]], int] = SCRIPT["main"]
    return found


def write_pages(folder: Path, text: Callable[[str], str]) -> None:
    for page in PAGES:
        (folder / page).parent.mkdir(parents=True, exist_ok=True)
        (folder / page).write_text(text(page), encoding="utf-8")


@pytest.mark.parametrize("table", [published.OFFICE31, published.OFFICE_HOME])
def test_published_means_are_those_of_their_tasks(table: dict[str, published.Published]) -> None:
    tasks = published.OFFICE31_TASKS if table is published.OFFICE31 else published.OFFICE_HOME_TASKS
    assert set(published.SOURCE_USING) | {"source", "shot", "vmp"} == set(table)
    for row in table.values():
        assert len(row.domains) == len(tasks)
        assert statistics.fmean(row.domains) == pytest.approx(row.value, abs=0.11)  # the paper rounds, sometimes down


def test_published_streams_are_means_of_fifteen() -> None:
    given = [
        said for known in published.ONLINE.values() for several in known.values() for said in several if said.domains
    ]
    assert len(given) == 4
    assert all(len(said.domains) == 15 for said in given)
    assert all(statistics.fmean(said.domains) == pytest.approx(said.value, abs=0.06) for said in given)


def test_published_harmonic_means_are_harmonic() -> None:
    for source, target, harmonic in published.GENERALIZED_OFFICE_HOME.values():
        assert 2 * source * target / (source + target) == pytest.approx(harmonic, abs=0.06)


def test_a_variant_has_its_methods_published_value() -> None:
    assert str(published.online("online-c10", "vmp:released")[0]) == "≈ 17.9"
    assert published.online("online-c100", "vmp") == ()


def test_table1_is_the_papers_where_we_agree() -> None:
    assert capabilities(methods.get("tent")) == published.TABLE1["tent"]
    assert capabilities(methods.get("shot")) == published.TABLE1["shot"]
    assert capabilities(methods.get("vmp")) == published.TABLE1["vmp"]
    for row in rows():
        for column in row["differs"]:
            assert row[column] != row["paper"][column]


def test_a_spread_needs_two_numbers() -> None:
    assert spread([0.25], 100) == "25.00"
    assert spread([1.0, 3.0], digits=1) == "2.0 ± 1.4"
    assert size([2_500_000.0]) == "2.5 MB"
    assert size([2500.0]) == "2.5 kB"
    assert markdown(["a", "b"], [["x|y", 1]]) == "| a | b |\n|---|---:|\n| x\\|y | 1 |\n"


def test_a_figures_title_says_what_it_found(tmp_path: Path) -> None:
    marks = [BarMark("tent", [20.0, 21.0], 20.7), BarMark("roid", [16.9], 16.2)]
    assert finding(marks, "C10") == "C10\nroid errs least: 16.9 %, published 16.2 % (one seed)"
    assert finding(marks, "C10", less_is_better=False).endswith("tent is best: 20.5 %, published 20.7 %")
    assert lines(tmp_path / "a.png", "title", {"tent": {1: 90.0, 200: 18.0}}, ("images a batch", "error %")) > 1000


def test_the_command_lists_names_and_cells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 0
    printed = capsys.readouterr().out
    assert all(f"{name} " in printed for name in NAMES)
    flags = ["bench", "online-c10", "--tiny", "--results", str(tmp_path), "--only", "source,tent", "--seeds", "1"]
    assert main([*flags, "--list", "--json"]) == 0
    cells = json.loads(capsys.readouterr().out)["cells"]
    assert cells == {f"tiny.continual.{name}.n12.s0.float32": "not run" for name in ("source", "tent")}
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_command_runs_once_and_keeps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["bench", "online-c10", "--tiny", "--results", str(tmp_path), "--only", "source", "--seeds", "1", "--quiet"]
    for ran, kept in ((1, 0), (0, 1)):
        assert main([*flags, "--json", "--device", "cpu"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["ran"], found["kept"], found["failed"]) == (ran, kept, 0)
    assert {Path(path).name for path in found["wrote"]} == {
        *("online-c10.json", "online-c10.md", "online-c10-tiny-continual.png")
    }


def test_the_command_writes_table1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "table1", "--results", str(tmp_path)]) == 0
    assert "| VMP |" in capsys.readouterr().out
    assert {row["method"] for row in json.loads((tmp_path / "table1.json").read_text())} == set(methods.names())


def test_table1_as_it_lies_here_is_what_the_methods_say() -> None:
    place = ROOT / "benchmarks" / "results" / "table1.md"
    assert place.read_text(encoding="utf-8") == table1(found := rows()), "run undrift bench table1"
    assert json.loads(place.with_suffix(".json").read_text(encoding="utf-8")) == json.loads(json.dumps(found))


@pytest.mark.parametrize(
    "wrong", [["bench", "nothing"], ["bench", "table1", "--tier", "C"], ["bench", "table1", "--set", "x"]]
)
def test_wrong_words_are_usage_errors(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(wrong) == 2
    assert "needed" in capsys.readouterr().err


@pytest.mark.slow
def test_tables_are_written_from_cells_and_none_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["bench", "online-c10", "--tiny", "--results", str(tmp_path), "--seeds", "1", "--json", "--quiet"]
    assert main([*flags, "--only", "source", "--device", "cpu"]) == 0
    page = tmp_path / "tiny" / "online-c10.md"
    first = page.read_text()
    page.unlink()
    capsys.readouterr()
    assert main([*flags, "--only", "source,tent", "--tables"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ran"], found["kept"], found["left"]) == (0, 1, 1)
    assert page.read_text() == first
    assert len(list((tmp_path / "tiny" / "online-c10").iterdir())) == 1


@pytest.mark.slow
def test_both_pages_of_the_same_cells_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "generalized", "--tables", "--results", str(tmp_path), "--json", "--quiet"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ran"], found["kept"]) == (0, 0)
    assert {Path(path).name for path in found["wrote"]} == {
        *("offline.json", "offline.md", "generalized.json", "generalized.md")
    }
    assert "not run" in (tmp_path / "generalized.md").read_text()


def test_what_has_no_cells_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "table1", "--tables"]) == 2
    assert "Leave --tables out" in capsys.readouterr().err


def test_the_pages_are_what_the_cells_say(readme: Callable[[list[str]], int]) -> None:
    assert readme(["--check"]) == 0, "run python benchmarks/readme.py"


@pytest.mark.parametrize("name", ["online-c10", "online-c100", "online-imagenet"])
def test_rows_that_are_not_source_free_are_named_where_they_are_shown(name: str) -> None:
    bench = find(name)
    assert isinstance(bench, OnlineBenchmark)
    told = not_source_free(bench.rows)
    assert [line.partition(":")[0] for line in told] == ["eata", "bacs, one member", "ttt"]
    place = next(place for place, blocks in PAGES.items() if name in blocks)
    page = (ROOT / place).read_text(encoding="utf-8")
    block = page[page.index(f"<!-- {name} -->") : page.index(f"<!-- /{name} -->")]
    result = (ROOT / "benchmarks" / "results" / f"{name}.md").read_text(encoding="utf-8")
    for line in told:
        assert f"- {line}\n" in result
        assert (f"- {line}\n" in block) == (f"| {line.partition(':')[0]} |" in block)
    assert f"- {bench.note}\n" in block  # what the published values beside ours are of


@pytest.mark.slow
def test_a_page_that_is_not_is_found_and_mended(readme: Callable[[list[str]], int], tmp_path: Path) -> None:
    write_pages(tmp_path, lambda page: (ROOT / page).read_text(encoding="utf-8"))
    here = ["--root", str(tmp_path)]
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    (tmp_path / "README.md").write_text(text.replace("| norm-stats |", "| norm-stats | 1.00"), encoding="utf-8")
    assert readme([*here, "--check"]) == 1
    assert "1.00" in (tmp_path / "README.md").read_text(encoding="utf-8")  # a check writes nothing
    assert readme(here) == 0
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == text


def test_without_cells_nothing_is_claimed(readme: Callable[[list[str]], int], tmp_path: Path) -> None:
    def marks(page: str) -> str:
        return "".join(f"<!-- {name} -->\nold\n<!-- /{name} -->\n" for name in PAGES[page])

    write_pages(tmp_path, marks)
    here = ["--root", str(tmp_path), "--results", str(tmp_path / "none")]
    assert readme(here) == 0
    for page, blocks in PAGES.items():
        text = (tmp_path / page).read_text(encoding="utf-8")
        assert "old" not in text
        if not page.endswith("cells.md"):  # which says of every cell that it is not run
            assert "|" not in text
            assert sum(text.count(f"Not {what} yet") for what in ("run", "measured")) >= len(blocks) - ("speed" in page)
    (tmp_path / "README.md").write_text("no place for a table")
    with pytest.raises(SystemExit, match=r"README.md has no place for summary; needed: <!-- summary -->"):
        readme(here)


def test_the_page_of_defaults_has_the_table_of_norm_policies() -> None:
    script = runpy.run_path(str(ROOT / "benchmarks" / "norm_policy.py"))
    result = json.loads((ROOT / "benchmarks" / "results" / "norm-policy.json").read_text(encoding="utf-8"))
    assert list(result["errors"]) == list(script["POLICIES"])
    assert script["table"](result) in (EXPLANATION / "defaults.md").read_text(encoding="utf-8")


def test_a_norm_policy_is_streamed_and_the_network_is_given_back() -> None:
    errors = runpy.run_path(str(ROOT / "benchmarks" / "norm_policy.py"))["errors"]
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(144, 3)
    )
    before = {name: value.clone() for name, value in net.state_dict().items()}
    domains = [torch.rand(8, 3, 8, 8), torch.rand(8, 3, 8, 8) / 2]
    found = errors(net, domains, torch.arange(8) % 3, "train", 4, 2)
    assert len(found) == 4
    assert all(value % 12.5 == 0 for value in found)  # per cent of eight images
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


def test_the_collapse_that_pages_tell_of_has_its_record() -> None:
    record = json.loads(
        (ROOT / "benchmarks" / "results" / "online-c10-moving-collapse.json").read_text(encoding="utf-8")
    )
    assert record["options"]["norm_statistics"] == "moving"
    assert undrift.Options().norm_statistics == "train"
    text = (EXPLANATION / "defaults.md").read_text(encoding="utf-8")
    assert "results/online-c10-moving-collapse.json" in text
    assert f"{100 * record['error']:.2f} %" in text
    assert f"{100 * record['source_error_after']:.2f} %" in text


def test_a_row_of_which_only_the_error_holds_shows_only_the_error() -> None:
    text = (ROOT / "benchmarks" / "results" / "online-c10.md").read_text(encoding="utf-8")
    store = Store(ROOT / "benchmarks" / "results" / "online-c10")
    bench = find("online-c10")
    cells = [cell for cell in bench.shown(Request(fast=True)) if store.shown(cell)]  # type: ignore[union-attr]
    records = {(cell.network, cell.setting, cell.row.label): store.shown(cell) for cell in cells}
    lines = [[part.strip() for part in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    assert sum("†" in parts[0] for parts in lines) == sum("note" in (record or {}) for record in records.values())
    for (network, setting, label), record in records.items():
        if (network, setting) == (cells[0].network, cells[0].setting):  # the first table
            parts = next(parts for parts in lines if parts[0].removesuffix(" †").strip("*") == label)
            assert (parts[3] == "–") == ("nll" not in (record or {}))
