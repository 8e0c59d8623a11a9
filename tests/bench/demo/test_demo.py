"""The demo runs, its sentence says what the numbers say, and the network that comes with it is what it claims to be."""

import json
import subprocess
import sys
from importlib.resources import as_file, files
from pathlib import Path

import pytest
import torch

from undrift import DataError, evaluate, methods
from undrift_bench.demo.__main__ import main
from undrift_bench.demo.domain_file import EXACT, NAME
from undrift_bench.demo.finding import Gain, gain, headline, sentence, spread
from undrift_bench.demo.rows import OURS, RIVALS, ROWS, TENT, TWIN, run
from undrift_bench.demo.setting import QUICK, WEIGHTS, DemoSetting, World, load_world, source_images
from undrift_bench.demo.streams import run_stream
from undrift_bench.demo.train import OPTIONS
from undrift_bench.demo.work import Job, do_all, jobs
from undrift_bench.train import read_header


@pytest.fixture(scope="module")
def world() -> World:
    return load_world(QUICK)


def test_demo_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "demo"
    assert main(["--quick", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    found = json.loads((out / "demo.json").read_text())
    assert list(found["table"]) == [row.name for row in ROWS]
    assert list(found["streams"]) == [row.name for row in ROWS if row.stream is not None]
    assert all(len(seeds) == 2 for part in ("table", "streams") for seeds in found[part].values())
    assert found["file"]["equal"]
    assert found["file"]["restored"]
    assert found["file"]["size"] == (out / NAME).stat().st_size < found["file"]["network"] / 5
    assert found["file"]["exact"] == (out / EXACT).stat().st_size
    assert found["file"]["same"] > 0.9
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "demo.png").stat().st_size < 300_000
    flat = " ".join(printed.split())
    assert all(text in flat for text in found["findings"])
    assert "its numbers mean nothing" in flat
    assert "bit for bit the same" in flat


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["--quick", "--out", str(tmp_path / "file" / "demo")]) == 1
    assert "cannot be made" in capsys.readouterr().err


def test_one_seed_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--quick", "--seeds", "1"])
    assert "two at least" in capsys.readouterr().err
    with pytest.raises(DataError, match="two at least"):
        gain([[True, False]], [[True, True]], "Tent")


def test_seeds_and_images_are_compared_in_pairs() -> None:
    # The same seed and the same images move both rows: apart they overlap, in pairs the gain is plain.
    hard, easy = [False] * 60 + [True] * 40, [False] * 20 + [True] * 80
    found = gain([hard, easy], [hard[:90] + [False] * 10, easy[:90] + [False] * 10], "Tent")
    assert found.points == pytest.approx(10)
    assert found.deviation == pytest.approx(0)
    assert found.error == pytest.approx(100 * (0.1 * 0.9 / 99) ** 0.5)
    assert found.outcome == "gained"


def test_seeds_that_agree_by_chance_are_no_proof() -> None:
    ours, theirs = [True] * 94 + [False] * 6, [False] * 5 + [True] * 95  # 6 and 5 wrong, not the same ones
    found = gain([ours] * 3, [theirs] * 3, "σ = 0")
    assert (found.points, found.deviation) == (pytest.approx(-1), 0)
    assert found.outcome == "no gain"


@pytest.mark.parametrize(
    ("points", "deviation", "error", "outcome"),
    [
        (3, 1, 0, "gained"),
        (3, 0, 1, "gained"),
        (2, 1, 0, "no gain"),
        (3, 0, 2, "no gain"),
        (-2, 1, 1, "no gain"),
        (-3, 1, 1, "lost"),
        (0, 0, 0, "no gain"),
    ],
)
def test_a_gain_is_more_than_twice_its_doubt(points: float, deviation: float, error: float, outcome: str) -> None:
    assert Gain("Tent", points, deviation, error, 3).outcome == outcome


def _gain(over: str, points: float) -> Gain:
    return Gain(over, points, 0.5, 0.4, 3)


def test_the_sentence_says_who_won() -> None:
    def said(twin: float, rival: float) -> str:
        return sentence("the scans", 66.2, "88.0 ± 0.3", _gain("its twin", twin), _gain("SHOT", rival))

    assert said(3, 2).startswith("Without a label, undrift takes the scans from 66.2 to 88.0 ± 0.3 % right (3 seeds)")
    assert "gained 2.00 ± 0.50 points over SHOT, the best rival" in said(3, 2)
    assert said(3, 2).endswith("the noise adds 3.0 points.")
    assert said(0.2, 2).endswith("the noise makes no difference.")
    assert "did NOT gain over its twin (+0.20 ± 0.50" in said(0.2, 2)
    assert "lost 4.00 ± 0.50 points against SHOT" in said(3, -4)
    assert said(-3, 2).endswith("the noise costs 3.0 points: without it the recipe is better.")


def test_headline_both_ways() -> None:
    assert headline(66.2, 88.4).endswith("66 % right. Adapted without a label: 88 %")
    assert headline(88.4, 66.2).startswith("undrift does not help here")


def test_ours_names_nothing_and_its_twin_differs_in_the_variance_alone() -> None:
    assert (OURS.adapt, OURS.stream) == ({}, {})
    assert TWIN.adapt == TWIN.stream == {"init_fraction": 0.0}
    for row in RIVALS:
        for loop, given in (("adapt", row.adapt), ("stream", row.stream)):
            assert given is None or methods.get(given["method"], loop)


def test_spread() -> None:
    assert spread([0.5, 0.5], 100) == "50.0"
    assert spread([0.4, 0.6], 100) == "50.0 ± 14.1"


@pytest.mark.slow
def test_the_network_that_comes_along_is_the_script_s() -> None:
    with as_file(files("undrift_bench.demo") / WEIGHTS) as path:
        header = read_header(path)
        assert path.stat().st_size < 300_000
    assert header.options == OPTIONS.as_dict()
    assert (header.domain, header.images, header.epoch) == ("digits mnist", 4000, OPTIONS.epochs)
    world = load_world(DemoSetting(held_out_images=None, target_images=None))
    report = evaluate(world.net, {"s": world.held_out.batches(250), "t": world.target.batches(250)})
    source, target = (result.scores for result in report.results)
    assert (source.count, target.count) == (1000, 1797)
    assert source.accuracy == pytest.approx(0.967, abs=0.002)
    assert target.accuracy == pytest.approx(0.662, abs=0.005)


@pytest.mark.slow
def test_training_images_are_not_held_out() -> None:
    training, held_out = source_images()
    names = {training.name_of(i) for i in range(len(training))}
    assert not names & {held_out.name_of(i) for i in range(len(held_out))}
    assert (len(names), len(held_out)) == (4000, 1000)


def test_rows_leave_the_network_as_it_was(world: World) -> None:
    before = {name: tensor.clone() for name, tensor in world.net.state_dict().items()}
    run(TENT, world, QUICK, 0)
    run_stream(OURS, world, QUICK, 0)
    assert all(torch.equal(before[name], tensor) for name, tensor in world.net.state_dict().items())


def test_every_row_of_a_stream_meets_the_same_images_and_a_seed_repeats(world: World) -> None:
    runs = [run_stream(TENT, world, QUICK, seed) for seed in (0, 0, 1)]
    assert runs[0] == runs[1]
    assert runs[0].right != runs[2].right
    assert list(runs[0].domains) == [*QUICK.corruptions, "clean"]
    assert len(runs[0].right) == 3 * QUICK.stream_images


def test_each_run_once() -> None:
    todo = jobs(DemoSetting())
    assert len(set(todo)) == len(todo) == 3 * (2 * len(ROWS) - 1)  # SHOT needs the whole domain
    assert sum(job.files for job in todo) == 1


@pytest.mark.slow
def test_processes_give_what_one_process_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = [job for job in jobs(QUICK) if job.row is TENT]
    monkeypatch.setattr("undrift_bench.demo.work.jobs", lambda _: few)
    one = dict(do_all(QUICK, tmp_path, 1))
    assert dict(do_all(QUICK, tmp_path, 2)) == one
    assert Job(True, ROWS.index(TENT), 0) in one


@pytest.mark.slow
def test_module_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "undrift_bench.demo", "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert "--quick" in done.stdout
