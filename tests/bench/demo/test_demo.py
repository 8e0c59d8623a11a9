"""The demo runs, its sentence says what the numbers say, and the network that comes with it is what it claims to be."""

import json
import subprocess
import sys
from importlib.resources import as_file, files
from pathlib import Path

import pytest
import torch

from undrift import DataError, Verdict, evaluate
from undrift.judge.verdict import Survey
from undrift_bench.demo.__main__ import main
from undrift_bench.demo.choose import choose
from undrift_bench.demo.domain_file import NAME
from undrift_bench.demo.finding import Gain, gain, headline, sentence, spread
from undrift_bench.demo.rows import CONTROL, ROWS, VMP, perturbed
from undrift_bench.demo.setting import QUICK, WEIGHTS, DemoSetting, World, load_world, source_images, stream_domains
from undrift_bench.demo.streams import STREAM_ROWS
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
    assert list(found["streams"]) == [row.name for row in STREAM_ROWS]
    assert all(len(seeds) == 2 for part in ("table", "streams") for seeds in found[part].values())
    assert found["file"]["equal"]
    assert found["file"]["restored"]
    assert found["file"]["size"] == (out / NAME).stat().st_size < found["file"]["network"] / 10
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


def _gains(source: float, control: float, tent: float) -> tuple[Gain, Gain, Gain]:
    return _gain("source", source), _gain("σ = 0", control), _gain("Tent", tent)


def test_sentence_says_that_the_noise_paid() -> None:
    text = sentence("On the target", *_gains(20, 3, 4))
    assert "gained 20.00 ± 0.50 points over source" in text
    assert text.endswith("The noise itself paid.")
    assert "NOT" not in text


def test_sentence_says_that_vmp_did_not_gain() -> None:
    assert "did NOT gain over σ = 0 (+0.20 ± 0.50" in sentence("On the target", *_gains(20, 0.2, 4))
    assert sentence("On the target", *_gains(20, 0.2, 4)).endswith("the noise did not pay.")
    assert sentence("On the target", *_gains(20, -3, 4)).endswith("without it the same method does better.")
    nothing = sentence("On the target", *_gains(0.1, 0.2, -4))
    assert nothing.endswith("Nothing was gained, with noise or without.")
    assert "lost 4.00 ± 0.50 points against Tent" in nothing
    assert sentence("On the target", *_gains(-9, 0.2, -4)).endswith("Nothing was gained, with noise or without.")


def test_headline_both_ways() -> None:
    up, down, same = (_gain("", points) for points in (20, -20, 0.1))
    assert headline(0.66, 0.86, up, up).endswith("and its noise adds 20.0 points over σ = 0")
    assert headline(0.66, 0.86, up, down).endswith("but its noise costs 20.0 points against σ = 0")
    assert headline(0.66, 0.86, up, same).endswith("but its noise adds nothing over σ = 0")
    assert headline(0.86, 0.66, down, same).startswith("VMP lowers 86 % to 66 %")
    assert headline(0.66, 0.66, same, same).startswith("VMP does not move 66 %")


def test_spread() -> None:
    assert spread([0.5, 0.5], 100) == "50.0"
    assert spread([0.4, 0.6], 100) == "50.0 ± 14.1"


def test_rate_is_chosen_without_labels() -> None:
    def verdict(entropy: float, diversity: float) -> Verdict:
        return Verdict(Survey(9, 10, 10, 0.6, 0.9), Survey(9, 10, 10, entropy, diversity))

    sure, surer, collapsed = verdict(0.5, 0.99), verdict(0.4, 0.99), verdict(0.0, 0.1)
    assert choose({1.0: {"a": sure, "b": sure}, 2.0: {"a": surer, "b": sure}}) == 2.0
    assert choose({1.0: {"a": sure, "b": sure}, 2.0: {"a": surer, "b": collapsed}}) == 1.0


@pytest.mark.slow
def test_the_network_that_comes_along_is_the_script_s() -> None:
    with as_file(files("undrift_bench.demo") / WEIGHTS) as path:
        header = read_header(path)
        assert path.stat().st_size < 300_000
    assert header.options == OPTIONS.as_dict()
    assert (header.domain, header.images, header.epoch) == ("digits mnist", 4000, OPTIONS.epochs)
    world = load_world(DemoSetting(held_out_images=None))
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
    for row in (CONTROL, VMP):
        row.run(world, QUICK, 0)
    assert all(torch.equal(before[name], tensor) for name, tensor in world.net.state_dict().items())
    with perturbed(world, 0) as model, model.off() as net:
        assert net is world.net


def test_the_stream_never_sees_the_images_that_measure_forgetting(world: World) -> None:
    domains, kept = stream_domains(QUICK, world)
    assert list(domains) == [*QUICK.corruptions, "clean"]
    assert all(d.images.shape == domains["clean"].images.shape for d in domains.values())
    seen = {domains["clean"].name_of(i) for i in range(len(domains["clean"]))}
    assert not seen & {kept.name_of(i) for i in range(len(kept))}


def test_each_run_once_and_the_source_network_needs_no_seeds() -> None:
    todo = jobs(DemoSetting())
    assert len(set(todo)) == len(todo)
    assert sum(job.files for job in todo) == 1
    assert [job.seed for job in todo if job.table and job.row is ROWS[0]] == [0]


@pytest.mark.slow
def test_processes_give_what_one_process_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = [job for job in jobs(QUICK) if job.row in (ROWS[0], STREAM_ROWS[1])]
    monkeypatch.setattr("undrift_bench.demo.work.jobs", lambda _: few)
    one = dict(do_all(QUICK, tmp_path, 1))
    assert dict(do_all(QUICK, tmp_path, 2)) == one
    assert Job(True, 0, 0) in one


@pytest.mark.slow
def test_module_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "undrift_bench.demo", "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert "--quick" in done.stdout
