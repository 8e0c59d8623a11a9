"""The pages of the offline and generalized benchmarks, from made-up records: widths, deviations, marks and notes."""

from dataclasses import replace
from pathlib import Path
from statistics import harmonic_mean
from typing import Any

import pytest

from undrift import methods
from undrift_bench.bench import MethodRow, Request, Store
from undrift_bench.bench.harness import published
from undrift_bench.bench.harness.notes import not_source_free, row_lines
from undrift_bench.bench.offline import generalized, report
from undrift_bench.bench.offline import report as offline_report
from undrift_bench.bench.offline.benchmark import Offline
from undrift_bench.bench.offline.masked import CHANGES
from undrift_bench.bench.offline.page import Page, notes
from undrift_bench.bench.offline.rows import offline_rows
from undrift_bench.bench.offline.sets import SETS
from undrift_bench.bench.online.rows import online_rows

MADE = {"hardware": "a GPU", "torch": "2.0", "date": "2030-01-02", "fast": False}


def page_of(folder: Path, dataset: str, **how: Any) -> Page:
    request = Request(**{"results": folder, "extra": {"dataset": dataset}, **how})
    found = SETS[dataset].shrunk() if request.tiny else SETS[dataset]
    return Page(Offline(), Store(folder / "offline"), request, found)


def fill(page: Page, row: MethodRow, source: float, target: float, **more: Any) -> None:
    """Write a record of every cell of a row; each seed has a hundredth more on the target."""
    for task in page.tasks:
        for cell in page.cells(row, task):
            accuracy = target + 0.01 * cell.seed
            both = {"accuracy": accuracy, "source_accuracy": source, "harmonic": harmonic_mean([source, accuracy])}
            page.store.put(cell, MADE | both | {"nll": 1.5, "ece": 0.25} | more)


def tables(text: str) -> list[list[list[str]]]:
    """Return the tables of a page: their lines, cell by cell, without the rules."""
    found: list[list[list[str]]] = []
    before = ""
    for line in text.splitlines():
        if line.startswith("|"):
            found += [[]] if not before.startswith("|") else []
            if not line.startswith("|---"):
                found[-1].append([cell.strip() for cell in line.split("|")[1:-1]])
        before = line
    return found


@pytest.mark.parametrize("make", [report.markdown, generalized.markdown])
@pytest.mark.parametrize("dataset", SETS)
@pytest.mark.parametrize("tiny", [True, False])
def test_every_line_of_a_table_has_a_cell_under_each_heading(
    make: Any, dataset: str, tiny: bool, tmp_path: Path
) -> None:
    page = page_of(tmp_path, dataset, tiny=tiny, seeds=1)
    fill(page, page.bench.rows[0], 0.9, 0.5)
    found = tables(make(page.bench, page.store, page.request))
    assert sum(len(lines) >= len(page.bench.rows) for _, *lines in found) >= 2
    for header, *lines in found:
        assert {len(line) for line in lines} == {len(header)}


@pytest.mark.parametrize("make", [report.markdown, generalized.markdown])
def test_the_column_of_aurc_is_there_where_a_record_has_it(make: Any, tmp_path: Path) -> None:
    page = page_of(tmp_path, "pacs", tiny=True, seeds=1)
    source, norm = page.bench.rows[:2]
    fill(page, source, 0.9, 0.5)
    assert "AURC" not in make(page.bench, page.store, page.request)
    fill(page, norm, 0.9, 0.5, aurc=0.125)
    header, *lines = tables(make(page.bench, page.store, page.request))[0]
    found = {line[0].strip("*"): line[header.index("AURC × 100")] for line in lines}
    assert (found[source.label], found[norm.label]) == ("not measured", "12.50")
    assert {len(line) for line in lines} == {len(header)}


def test_what_was_not_run_has_the_papers_table(tmp_path: Path) -> None:
    page = page_of(tmp_path, "pacs", seeds=1)
    text = report.markdown(page.bench, page.store, page.request)
    # In the order of each of the paper's tables, which differ.
    order = {"Office-31": ["BNM", "SAFN", "CDAN+E"], "Office-Home": ["CDAN+E", "SAFN", "BNM"]}
    for name, between in order.items():
        (header, *lines), *_ = tables(text[text.index(f"## {name}\n") :])
        rows = {line[0]: line[1:] for line in lines}
        others = ["DAN", "DANN", "MCD", *between, "MDD", "BDG"]
        assert set(others) == set(published.SOURCE_USING)
        assert list(rows)[:8] == [f"{other} (published, not run)" for other in others]
        assert all(cell.startswith("not run (") for cell in rows["vmp-shot:paper"])
        assert len(rows["shot"]) == len(header) - 1
    page = page_of(tmp_path, "office31", seeds=1)
    text = report.markdown(page.bench, page.store, page.request)
    assert text.count("## Office-31") == text.count("## Office-Home") == 1


def test_published_values_follow_the_tasks_of_the_page(tmp_path: Path) -> None:
    page = page_of(tmp_path, "office31", tiny=True, seeds=1)
    header, *lines = tables(report.markdown(page.bench, page.store, page.request))[-1]
    assert header[1:] == ["A→W", "W→A", "Mean"]
    rows = {line[0]: line[1:] for line in lines}
    assert rows["BDG (published, not run)"] == ["(93.6)", "(72.0)", ""]  # its mean is over six tasks
    assert rows["shot"] == ["not run (90.1)", "not run (74.3)", "not run"]


def test_the_papers_mean_is_drawn_beside_a_mean_over_the_same_tasks_alone(tmp_path: Path) -> None:
    page = page_of(tmp_path, "office-home", seeds=1)
    row = next(row for row in page.bench.rows if row.name == "shot")
    fill(page, row, 0.7, 0.6)
    for module, said in ((generalized, published.GENERALIZED_OFFICE_HOME["shot"][2]), (offline_report, 71.8)):
        assert module._mark(page, row, list(page.tasks)).published == said
        assert module._mark(page, row, list(page.tasks[:11])).published is None
        small = page_of(tmp_path / "tiny", "office-home", seeds=1, tiny=True)
        fill(small, row, 0.7, 0.6)
        assert module._mark(small, row, list(small.tasks)).published is None


def test_the_generalized_page_says_on_what_and_when_it_was_made_and_what_it_cost(tmp_path: Path) -> None:
    page = page_of(tmp_path, "pacs", tiny=True, seeds=2)
    source, norm, shot = page.bench.rows[:3]
    told = {"milliseconds": 12.5, "peak_mib": 300.0, "learnables": 1234, "file_bytes": 2500}
    fill(page, source, 0.9, 0.5, warnings=["odd images"], **told)
    page.store.put(page.cells(shot, page.tasks[0])[0], MADE | {"failed": "it broke"})
    text = generalized.markdown(page.bench, page.store, page.request)
    assert "a GPU; torch 2.0; float32; 2030-01-02; seeds 0, 1; 40 images of each domain." in text
    summary, by_task = tables(text)
    line = dict(zip(summary[0], summary[1], strict=True))
    assert (line["source %"], line["target %"]) == ("90.00 ± 0.00", "50.50 ± 0.71")
    assert (line["NLL"], line["ECE %"]) == ("1.500 ± 0.000", "25.0 ± 0.0")
    costs = ("ms a batch", "peak MiB", "learnables", "file", "cells")
    assert [line[name] for name in costs] == ["12.5", "300", "1,234", "2.5 kB", "4"]
    assert by_task[1][1] == "90.0 ± 0.0 / 50.5 ± 0.7 / 64.7 ± 0.6"
    assert [row[1] for row in by_task[1:4]] == [by_task[1][1], "not run", "failed"]
    assert norm.name == by_task[2][0]
    assert f"- shot failed in 1 cells, the first ({page.tasks[0].title}): it broke" in text
    assert "- source warned: odd images" in text


def test_a_mean_over_the_main_tasks_counts_their_cells_alone(tmp_path: Path) -> None:
    page = page_of(tmp_path, "pacs", seeds=1)
    fill(page, page.bench.rows[0], 0.9, 0.5)
    main, whole, _ = tables(generalized.markdown(page.bench, page.store, page.request))
    assert (main[1][-1], whole[1][-1]) == ("6", "12")


WITHDRAWN = {"source_accuracy": None, "harmonic": None, "withdrawn": "measured under the wrong mask."}


@pytest.mark.parametrize("tasks", [1, 2], ids=["of one task", "of all"])
def test_a_number_that_was_withdrawn_is_in_no_mean_and_says_why(tasks: int, tmp_path: Path) -> None:
    page = page_of(tmp_path, "pacs", tiny=True, seeds=2)
    row = page.bench.rows[0]
    fill(page, row, 0.9, 0.5)
    for cell in (cell for task in page.tasks[:tasks] for cell in page.cells(row, task)):
        record = page.store.finished(cell)
        assert record is not None
        page.store.put(cell, record | WITHDRAWN)
    left = "90.00 ± 0.00 (1 of 2 tasks)" if tasks == 1 else "not measured"
    for make, source in ((report.markdown, "held-out source %"), (generalized.markdown, "source %")):
        text = make(page.bench, page.store, page.request)
        header, line, *_ = tables(text)[0]
        found = dict(zip(header, line, strict=True))
        assert (found["method"], found[source]) == ("source †", left)
        assert "- † source: withdrawn: measured under the wrong mask.\n" in text
    assert found["target %"] == "50.50 ± 0.71"
    assert found["mean of harmonics %"] == found["harmonic of means %"]
    assert found["harmonic of means %"].endswith("(1 of 2 tasks)" if tasks == 1 else "not measured")
    by_task = tables(text)[-1][1][1:]
    assert by_task[0] == "not measured / 50.5 ± 0.7 / not measured"
    assert by_task[1] == ("90.0 ± 0.0 / 50.5 ± 0.7 / 64.7 ± 0.6" if tasks == 1 else by_task[0])
    assert len(page.compared("harmonic")[1]) == 2 - tasks
    assert len(page.compared()[1]) == 2
    assert len(generalized.figures(page.bench, page.store, page.request)) == 2 - tasks


def test_seeds_without_a_number_in_common_still_have_a_mean(tmp_path: Path) -> None:
    page = page_of(tmp_path, "pacs", tiny=True, seeds=2)
    row, first = page.bench.rows[0], page.tasks[0]
    fill(page, row, 0.9, 0.5)
    for seed, task in enumerate(page.tasks):  # each seed has lost another task
        cell = page.cells(row, task)[seed]
        record = page.store.finished(cell)
        assert record is not None
        page.store.put(cell, record | WITHDRAWN)
    assert page.text(row, page.tasks, "source_accuracy") == "90.00"
    assert page.text(row, [first], "source_accuracy") == "90.00"
    header, line, *_ = tables(generalized.markdown(page.bench, page.store, page.request))[0]
    whole = 100 * harmonic_mean([0.9, 0.505])
    assert dict(zip(header, line, strict=True))["harmonic of means %"] == f"{whole:.2f}"


def test_both_harmonic_means_say_of_how_many_tasks_they_are(tmp_path: Path) -> None:
    page = page_of(tmp_path, "pacs", tiny=True, seeds=1)
    row, (first, _) = page.bench.rows[0], page.tasks
    (cell,) = page.cells(row, first)
    page.store.put(cell, MADE | {"accuracy": 0.5, "source_accuracy": 0.5, "harmonic": 0.5, "nll": 1.0, "ece": 0.1})
    header, line, *_ = tables(generalized.markdown(page.bench, page.store, page.request))[0]
    found = dict(zip(header, line, strict=True))
    columns = ("source %", "target %", "mean of harmonics %", "harmonic of means %")
    assert {found[name] for name in columns} == {"50.00 (1 of 2 tasks)"}


def test_gsfda_says_that_its_source_is_another_network() -> None:
    (line,) = (line for line in row_lines(offline_rows()) if line.startswith("gsfda: its source network"))
    assert CHANGES == {"schedule": "constant", "weight_decay": 5e-4}
    assert "with constant rates and a weight decay of 5e-4" in line


def test_rows_that_look_at_the_source_say_what_they_need() -> None:
    for rows in (offline_rows(), *(online_rows(data) for data in ("cifar10", "cifar100", "imagenet"))):
        guilty = [row for row in rows if not methods.get(row.method).source_free]
        lines = not_source_free(rows)
        assert [line.partition(":")[0] for line in lines] == [row.label for row in guilty]
        for row, line in zip(guilty, lines, strict=True):
            needs = methods.get(row.method).needs
            assert needs
            assert line == f"{row.label}: not purely source-free; it needs {needs}."
    assert set(not_source_free(offline_rows())) <= set(notes(offline_rows()))
    assert {row.name for row in offline_rows() if not methods.get(row.method).source_free} == {"gsfda"}


def test_a_rows_own_note_stands_under_the_offline_tables_too(tmp_path: Path) -> None:
    bench = Offline()
    bench.rows[:2] = [replace(bench.rows[0], note="mind the step."), bench.rows[1]]
    page = page_of(tmp_path, "pacs", tiny=True)
    assert "source: mind the step." in row_lines(bench.rows)
    for make in (report.markdown, generalized.markdown):
        text = make(bench, page.store, page.request)
        assert "- source: mind the step.\n" in text
        assert "- gsfda: not purely source-free; it needs two feature masks trained with the source.\n" in text
