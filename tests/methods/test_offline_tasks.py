"""What the offline tables run and say where authors give values for one task, or gave no code."""

import pytest

from undrift import methods
from undrift_bench.bench.harness.request import Request
from undrift_bench.bench.offline.benchmark import Offline
from undrift_bench.bench.offline.report import _notes
from undrift_bench.bench.offline.rows import OF_A_TASK
from undrift_bench.bench.offline.sets import SETS


def neighbours(dataset: str, row: str, tiny: bool = False) -> dict[str, tuple[int, int]]:
    """Return K and M of a row in each task of a data set."""
    bench, request = Offline(), Request(tiny=tiny, seeds=1, extra={"dataset": dataset}, only=(row,))
    found = {}
    for cell in bench.cells(request):
        asked = methods.get(cell.row.method, "adapt").build(cell.row.settings).likelihood
        found[cell.setting] = (asked.neighbours, asked.second_neighbours)
    return found


def test_nrc_has_other_neighbours_from_amazon_to_webcam() -> None:
    tasks = [task.name for task in SETS["office31"].tasks]
    assert neighbours("office31", "nrc") == {task: (3, 2) if task == "A-W" else (2, 3) for task in tasks}
    assert neighbours("office31", "nrc", tiny=True) == {"A-W": (3, 2), "W-A": (2, 3)}
    assert set(neighbours("office-home", "nrc").values()) == {(3, 2)}
    assert set(neighbours("office31", "vmp-nrc").values()) == {(3, 2)}  # its own, Office-Home's


def test_the_task_is_part_of_what_a_cell_is() -> None:
    cells = Offline().cells(Request(seeds=1, extra={"dataset": "office31"}, only=("nrc",)))
    resolved = {cell.setting: cell.identity["resolved"] for cell in cells}
    assert len({resolved[task] for task in resolved if task != "A-W"}) == 1
    assert resolved["A-W"] not in {resolved[task] for task in resolved if task != "A-W"}
    # Whoever reads the file later sees it, too.
    assert {c.setting: c.identity["settings"] for c in cells}["A-W"] == {"neighbours": 3, "second_neighbours": 2}


@pytest.mark.parametrize(("name", "task"), OF_A_TASK)
def test_values_of_a_task_are_settings_of_a_row_that_runs_there(name: str, task: str) -> None:
    dataset = name.partition(":")[2]
    assert task in {t.name for t in SETS[dataset].tasks}
    assert name.partition(":")[0] in {row.method for row in Offline().rows}
    methods.get(name, "adapt").build(OF_A_TASK[name, task])


def test_what_no_code_was_released_for_says_whose_number_stands_beside_it() -> None:
    (line,) = [line for line in _notes(Offline()).splitlines() if line.startswith("- vmp-shot:released:")]
    assert "released no code for whole domains" in line
    assert "the same as beside vmp-shot:paper" in line
