"""The offline and generalized benchmarks: trees of random images, a tiny network, every number where it belongs."""

import json
import runpy
from dataclasses import replace
from pathlib import Path
from statistics import harmonic_mean
from typing import Any

import pytest

import undrift
from tree_support import Silent, plant, small
from undrift_bench.bench import Request, Store
from undrift_bench.bench.harness import published as numbers
from undrift_bench.bench.harness.run import run
from undrift_bench.bench.offline.benchmark import Offline
from undrift_bench.bench.offline.generalized import Generalized, harmonics
from undrift_bench.bench.offline.page import Page
from undrift_bench.bench.offline.rows import ablation_rows, offline_rows
from undrift_bench.bench.offline.run import Adapting
from undrift_bench.bench.offline.sets import SETS, asked, paper_row
from undrift_bench.bench.offline.sources import Images, Sources
from undrift_bench.bench.offline.tiny import CROP, TINY, TinyShot, tiny_setup
from undrift_bench.data.office_31 import CLASSES

BAR: Any = Silent()


def tiny(folder: Path, **more: Any) -> Request:
    return Request(**{"results": folder, "tiny": True, "seeds": 1, "device": "cpu", **more})


def test_pacs_has_twelve_tasks_of_which_six_come_first():
    tasks = SETS["pacs"].tasks
    assert len({task.name for task in tasks}) == 12
    assert [task.name for task in tasks if task.main][:2] == ["photo-sketch", "photo-art_painting"]
    assert sum(task.main for task in tasks) == 6


@pytest.mark.parametrize("name", ["office31", "office-home"])
def test_tasks_of_office_are_the_papers_in_its_order(name):
    dataset = SETS[name]
    titles = numbers.OFFICE31_TASKS if name == "office31" else numbers.OFFICE_HOME_TASKS
    assert tuple(task.title for task in dataset.tasks) == titles
    assert all({task.source, task.target} <= dataset.images.keys() for task in dataset.tasks)
    assert all(len(row.domains) == len(dataset.tasks) for row in dataset.published.values())


@pytest.mark.parametrize("rows", [offline_rows(), ablation_rows()], ids=["tables", "ablation"])
def test_every_row_is_a_method_and_every_control_says_what_it_asks(rows):
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        undrift.methods.get(row.method, "adapt").build(row.settings)
        assert bool(row.why) == row.control == bool(row.settings)


def test_an_ablation_runs_when_it_is_asked_for(tmp_path):
    bench, request = Offline(), tiny(tmp_path, settings=("photo-sketch",))
    asked_for = {c.row.name for c in bench.cells(replace(request, only=("ablation",)))}
    assert asked_for == {row.name for row in ablation_rows()}
    assert not asked_for & {c.row.name for c in bench.cells(request)}


def test_authors_values_for_a_data_set_are_taken():
    bench, request = Offline(), Request()
    nrc = next(row for row in bench.rows if row.name == "nrc")
    office, home = (bench.setup(request, SETS[name]) for name in ("office31", "pacs"))
    assert bench.of(office, office.dataset.tasks[0], nrc, request)[0].row.method == "nrc:office31"
    assert bench.of(home, home.dataset.tasks[0], nrc, request)[0].row.method == "nrc"


def test_tier_a_is_six_tasks_with_every_seed_and_the_rest_has_one():
    bench = Offline()
    first = bench.cells(Request(tier="A", seeds=3, only=("shot",)))
    # "shot" names the row and SHOT's own control is not of that name.
    assert {cell.row.name for cell in first} == {"shot"}
    assert len(first) == 6 * 3
    second = bench.cells(Request(tier="B", seeds=3, only=("shot",)))
    assert {cell.seed for cell in second} == {0}
    assert not {cell.setting for cell in first} & {cell.setting for cell in second}
    assert {cell.images for cell in first} == {1670, 2048, 2344, 3929}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*images; PACS publishes:undrift.UndriftWarning")
def test_a_cell_on_a_tree_gives_target_and_held_out_source(pacs, tmp_path):
    request = Request(
        data=pacs,
        results=tmp_path / "results",
        cache=tmp_path / "cache",
        seeds=1,
        device="cpu",
        only=("source", "vmp-shot:paper"),
        settings=("photo-sketch",),
    )
    bench = Offline(make_setup=small)
    outcome = run(bench, request, lambda _: None, quiet=True)
    assert (outcome.ran, outcome.failed) == (2, 0)
    source, vmp = Store(request.results / "offline").all(bench.cells(request))
    assert source["learnables"] == 0 < vmp["learnables"] < 200
    assert (source["scored"], vmp["scored"]) == (28, 28)
    for record in (source, vmp):
        assert record["harmonic"] == pytest.approx(harmonic_mean([record["source_accuracy"], record["accuracy"]]))
        assert record["file_bytes"] > 0
    assert source["source_network"] == vmp["source_network"]
    # The source row is the source network, asked with centre crops.
    made_of = small(SETS["pacs"], request)
    images = Images(made_of, request)
    net = Sources(made_of, images, request).network("photo", 0)
    assert source["source_network"] == undrift.fingerprint(net)[:12]
    target = images("sketch")
    right = undrift.predict(net, TINY(target.images)).label == target.labels
    assert source["accuracy"] == pytest.approx(float(right.float().mean()))
    again = run(bench, request, lambda _: None, quiet=True)
    assert (again.ran, again.kept) == (0, 2)
    text = (request.results / "offline.md").read_text()
    assert "not run" in text
    assert "| source | " in text
    assert (request.results / "offline.png").stat().st_size > 1000


@pytest.mark.slow
def test_office_has_the_papers_table_with_a_value_in_every_cell(tmp_path):
    for shade, domain in enumerate(("amazon", "webcam")):
        plant(tmp_path / "office" / domain / "images", CLASSES, 1, 50 * shade)
    request = Request(
        data=tmp_path / "office",
        results=tmp_path / "results",
        seeds=1,
        device="cpu",
        only=("shot",),
        settings=("A-W",),
        extra={"dataset": "office31"},
    )
    bench = Offline(make_setup=small)
    outcome = run(bench, request, lambda _: None, quiet=True)
    assert outcome.ran == 1
    text = outcome.text
    table = text[text.index("| method | A→W") : text.index("## Office-Home")]
    rows = {
        line.split("|")[1].strip(): [c.strip() for c in line.split("|")[2:-1]]
        for line in table.splitlines()[2:]
        if line.startswith("|")
    }
    for name in numbers.SOURCE_USING:
        said = numbers.OFFICE31[name]
        assert rows[f"{name} (published, not run)"] == [*(f"({v:.1f})" for v in said.domains), f"({said})"]
    assert rows["source"][0] == "not run (76.9)"
    assert rows["shot"][0].endswith(" (90.1)")
    assert "not run" not in rows["shot"][0]
    assert rows["vmp-shot:paper"][-1] == "not run (90.0)"
    assert "(1 of 6 tasks)" in rows["shot"][-1]


def test_every_row_runs_tiny_and_one_run_gives_two_pages(tmp_path):
    request = tiny(tmp_path, settings=("photo-sketch",), cache=tmp_path / "cache")
    bench = Generalized()
    outcome = bench(request, lambda _: None, quiet=True)
    assert outcome.failed == 0
    assert {path.name for path in outcome.wrote} == {
        *("offline.json", "offline.md", "offline.png"),
        *("generalized.json", "generalized.md", "generalized.png"),
    }
    content = json.loads((tmp_path / "generalized.json").read_text())
    assert {cell["row"] for cell in content["cells"]} == {row.name for row in offline_rows()}
    assert not (tmp_path / "generalized").exists()
    page = (tmp_path / "generalized.md").read_text()
    assert "mean of harmonics" in page
    assert "not run" in page  # the way back
    controls = {cell["row"]: cell for cell in content["cells"]}
    still = controls["vmp-shot-sigma-0"]
    assert (still["options"]["layers"], still["options"]["test_samples"]) == ([], 0)
    # No layer has noise, and so no log-variance counts: norm affine alone, as in SHOT-BN.
    assert still["learnables"] == controls["shot-bn"]["learnables"] < controls["vmp-shot:paper"]["learnables"]


def test_the_two_harmonic_means_are_those_of_a_report(tmp_path):
    bench, request = Offline(), tiny(tmp_path)
    page = Page(bench, Store(tmp_path / "offline"), request, asked(request))
    row = bench.rows[0]
    values = [(0.9, 0.3), (0.5, 0.7)]
    for task, (source, target) in zip(page.tasks, values, strict=True):
        (cell,) = page.cells(row, task)
        both = {"accuracy": target, "source_accuracy": source, "harmonic": harmonic_mean([source, target])}
        page.store.put(cell, both)
    of_tasks, of_means = harmonics(page, row, page.tasks)
    assert of_tasks == pytest.approx([(0.45 + 7 / 12) / 2])
    assert of_means == pytest.approx([harmonic_mean([0.7, 0.5])])


def test_a_mean_over_some_tasks_says_so(tmp_path):
    bench, request = Offline(), tiny(tmp_path, seeds=2)
    page = Page(bench, Store(tmp_path / "offline"), request, asked(request))
    row, (there, back) = bench.rows[0], page.tasks
    assert page.text(row, page.tasks, "accuracy") == "not run"
    for cell, value in zip(page.cells(row, there), (0.2, 0.4), strict=True):
        page.store.put(cell, {"accuracy": value})
    assert page.text(row, page.tasks, "accuracy") == "30.00 ± 14.14 (1 of 2 tasks)"
    page.store.put(page.cells(row, back)[0], {"failed": "it broke"})
    assert page.failures() == {"source": f"in 1 cells, the first ({back.title}): it broke"}
    page.store.put(page.cells(row, back)[0], {"accuracy": 0.6})
    # Seed 1 has one task of two: no mean of a seed, but of the tasks' own (30 and 60).
    assert page.means(row, page.tasks, "accuracy") == []
    assert page.text(row, page.tasks, "accuracy") == "45.00"
    assert page.compared() == ([row], [there, back])


def test_a_picture_shows_the_most_cells_between_which_none_lacks_a_number(tmp_path):
    bench, request = Offline(), tiny(tmp_path, seeds=1)
    page = Page(bench, Store(tmp_path / "offline"), request, asked(request))
    assert page.compared() == ([], [])
    (first, second, third, *_), (there, back) = bench.rows, page.tasks
    for row, tasks in ((first, page.tasks), (second, page.tasks), (third, [there])):
        for task in tasks:
            page.store.put(page.cells(row, task)[0], {"accuracy": 0.5})
    assert page.compared() == ([first, second], [there, back])  # four cells; three rows on one task would be three
    page = Page(bench, page.store, replace(request, seeds=3), asked(request))
    for row in (first, second, third):
        for cell in page.cells(row, there):
            page.store.put(cell, {"accuracy": 0.5})
    assert page.compared() == ([first, second, third], [there])  # nine cells, with their seeds


def test_statistics_of_the_batch_are_asked_for_in_batches_of_the_method(tmp_path, monkeypatch):
    request = tiny(tmp_path)
    adapting = Adapting(tiny_setup(asked(request)), request)
    sizes: list[int] = []
    original = undrift.predict

    def counted(model: Any, images: Any, samples: Any = None) -> Any:
        sizes.append(len(images))
        return original(model, images, samples)

    monkeypatch.setattr(undrift, "predict", counted)
    target = adapting.images("sketch")
    for statistics, expected in (("batch", [16, 16, 8]), ("source", [40])):
        sizes.clear()
        model = undrift.perturb(TinyShot(4), norm_statistics=statistics, test_samples=1)
        adapting.scores(model, target, 16)
        assert sizes == expected


def test_names_of_the_papers_rows():
    assert [paper_row(n) for n in ("vmp-shot:paper", "shot", "shot-bn")] == ["vmp", "shot", "shot-bn"]
    assert TINY.resize[0] > CROP


def test_the_script_takes_the_names_that_people_know():
    flags = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "offline.py"))["flags"]
    assert flags(["--dataset", "office31", "--root", "F", "--fast"]) == [
        *("--set", "dataset=office31", "--data", "F", "--fast"),
    ]
    assert flags(["--dataset=pacs", "--root=F"]) == ["--set", "dataset=pacs", "--data=F"]
