"""The online benchmarks, on a tiny network and random images: streams, numbers, tables, figures."""

import copy
import json
import statistics
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import undrift
from online_support import Given, numbered
from tree_support import Silent
from undrift import OptionError
from undrift_bench.bench import Request, Store, find
from undrift_bench.bench.harness.cell import Cell, MethodRow
from undrift_bench.bench.harness.measure import Clock, Scoring
from undrift_bench.bench.harness.networks import tiny_data
from undrift_bench.bench.harness.run import run
from undrift_bench.bench.online.benchmark import OnlineBenchmark
from undrift_bench.bench.online.corrupted import Corrupted
from undrift_bench.bench.online.rows import ablation_rows, online_rows, variant
from undrift_bench.bench.online.settings import CONTINUAL, SETTINGS, UP_AND_DOWN, StreamSetting, plan
from undrift_bench.bench.online.streaming import Streaming

NAMES = ("online-c10", "online-c100", "online-imagenet")
SETTING = {setting.name: setting for setting in SETTINGS}


def bench(name: str = "online-c10") -> OnlineBenchmark:
    found = find(name)
    assert isinstance(found, OnlineBenchmark)
    return found


def tiny(folder: Path, *only: str, **more: Any) -> Request:
    return Request(**{"results": folder, "tiny": True, "only": only, "seeds": 1, "device": "cpu", **more})


def record(folder: Path, *only: str, **more: Any) -> dict[str, Any]:
    request = tiny(folder, *only, **more)
    run(bench(), request, lambda _: None, quiet=True)
    (found,) = Store(folder / "online-c10").all(bench().cells(request))
    return found


def test_a_cell_has_every_number(tmp_path: Path) -> None:
    found = record(tmp_path, "tent")
    assert set(found["domains"]) == {"gaussian_noise", "contrast"}
    assert found["error"] == pytest.approx(statistics.fmean(d["error"] for d in found["domains"].values()))
    assert found["scored"] == 24
    assert found["unanswered"] == 0
    assert found["learnables"] == 32
    assert found["file_bytes"] > 1000
    assert found["milliseconds"] > 0
    assert found["peak_mib"] is None
    assert 0 <= found["source_error_after"] <= 1
    assert found["nll"] > 0
    assert 0 <= found["ece"] <= 1
    for name in ("aurc", "augrc"):
        assert found[name] == pytest.approx(statistics.fmean(d[name] for d in found["domains"].values()))
    assert found["options"]["stream_lr"] == 1e-3
    assert {"hardware", "date", "torch", "seconds", "fast"} <= found.keys()


@pytest.mark.slow
def test_every_setting_runs_in_half_precision(tmp_path: Path) -> None:
    request = tiny(tmp_path, "norm-stats", settings=("all",), fast=True)
    outcome = run(bench(), request, lambda _: None, quiet=True)
    assert (outcome.ran, outcome.failed) == (len(SETTINGS), 0)
    names = {path.name for path in outcome.wrote}
    assert {"online-c10-tiny-continual.png", "online-c10-tiny-mixed.png", "online-c10-tiny-batch.png"} <= names
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in outcome.wrote if path.suffix == ".png")
    assert "| norm-stats |" in outcome.text
    assert "batch-16" in outcome.text


@pytest.mark.slow
def test_one_size_of_a_batch_is_no_curve(tmp_path: Path) -> None:
    drawn = {}
    for sizes in (("batch-4",), ("batch-4", "batch-16")):
        request = tiny(tmp_path, "source", settings=sizes)
        run(bench(), request, lambda _: None, quiet=True)
        drawn[len(sizes)] = list(bench().figures(Store(tmp_path / "online-c10"), request))
    assert drawn == {1: [], 2: ["-tiny-batch"]}


@pytest.mark.slow
def test_episodic_streams_forget_between_batches(tmp_path: Path) -> None:
    kept = record(tmp_path, "tent", settings=("continual",))
    reset = record(tmp_path, "tent", settings=("episodic",))
    assert reset["nll"] != kept["nll"]
    net = record(tmp_path, "norm-stats", settings=("continual",))
    assert reset["nll"] == pytest.approx(net["nll"])  # Tent answers before its step, and every step is taken back


@pytest.mark.slow
def test_single_images_are_gathered_for_a_step(tmp_path: Path) -> None:
    alone = record(tmp_path, "norm-stats", settings=("gather-64",))
    assert (alone["batch"], alone["gather"]) == (1, 6)  # the tiny stand-in has batches of 6
    assert alone["options"]["norm_statistics"] == "train"
    assert "gather" not in record(tmp_path, "norm-stats", settings=("batch-4",))
    learned = record(tmp_path, "tent", settings=("gather-64",))
    assert learned["steps"] == 4  # 24 images
    # It is no point of the curve over sizes of batches: it has a picture of its own.
    drawn = bench().figures(Store(tmp_path / "online-c10"), tiny(tmp_path, "tent"))
    assert list(drawn) == ["-tiny-gather-64"]


@pytest.mark.slow
def test_classes_in_runs_are_learned_from_a_balanced_memory(tmp_path: Path) -> None:
    runs, plain = (record(tmp_path, "tent", settings=(name,)) for name in ("balanced-128", "classes-2000"))
    assert (runs["batch"], runs["gather"], runs["balanced"]) == (6, 6, True)
    assert not {"gather", "balanced"} & plain.keys()
    # Six images in runs are mostly of one predicted class, and of one class alone nothing is learned.
    assert runs["steps"] < plain["steps"] == 4
    drawn = bench().figures(Store(tmp_path / "online-c10"), tiny(tmp_path, "tent"))
    assert list(drawn) == ["-tiny-classes-2000", "-tiny-balanced-128"]  # neither asks about sizes of batches


@pytest.mark.parametrize("name", NAMES)
def test_tables_have_the_published_value_and_what_was_not_run(name: str, tmp_path: Path) -> None:
    outcome = run(bench(name), tiny(tmp_path, "source", seeds=1), lambda _: None, quiet=True)
    lines = {line.split(" | ")[0].strip("| *"): line for line in outcome.text.splitlines() if line.startswith("|")}
    published = {"online-c10": "43.5", "online-c100": "46.4", "online-imagenet": "82.4"}[name]
    first = next(line for line in outcome.text.splitlines() if line.startswith("| source |"))
    assert first.split(" | ")[2] == published
    assert "| not run | " in lines["cotta"]
    assert "± " not in first  # one seed has no deviation
    content = json.loads((tmp_path / f"{name}.json").read_text())
    assert [cell["row"] for cell in content["cells"]] == ["source"]


def test_seeds_give_a_deviation_and_controls_say_what_they_change(tmp_path: Path) -> None:
    request = tiny(tmp_path, "norm-stats", "vmp-sigma-0", seeds=2)
    text = run(bench(), request, lambda _: None, quiet=True).text
    assert "± " in next(line for line in text.splitlines() if line.startswith("| norm-stats |"))
    assert "vmp, σ = 0: a control" in text
    assert "init_fraction 0.0" in text
    assert "seeds 0, 1" in text


def test_the_column_of_aurc_is_there_where_a_record_has_it(tmp_path: Path) -> None:
    request = tiny(tmp_path, "source", "norm-stats", seeds=1)
    run(bench(), request, lambda _: None, quiet=True)
    store = Store(tmp_path / "online-c10")
    source, norm = bench().cells(request)

    def line(name: str) -> dict[str, str]:
        lines = bench().markdown(store, request).splitlines()
        header, found = (next(x for x in lines if x.startswith(f"| {start} |")) for start in ("method", name))
        return dict(zip(header.split(" | "), found.split(" | "), strict=True))

    new = store.all([source])[0]
    store.put(norm, _without_aurc(store.all([norm])[0]))
    assert line("source")["AURC × 100"] == f"{100 * new['aurc']:.2f}"
    assert line("norm-stats")["AURC × 100"] == "–"
    store.put(source, _without_aurc(new))
    assert "AURC × 100" not in line("source")


def _without_aurc(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in ("aurc", "augrc")}


@pytest.mark.slow
def test_a_method_that_breaks_is_named_with_its_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(undrift, "stream", broken)
    outcome = run(bench(), tiny(tmp_path, "tent", "source"), lambda _: None, quiet=True)
    assert outcome.failed == 2
    assert "- tent failed: RuntimeError: no such kernel" in outcome.text
    assert "| tent | failed |" in outcome.text


def test_a_method_that_does_not_exist_is_not_run(tmp_path: Path) -> None:
    request = tiny(tmp_path)
    cell = Cell("online-c10", "tiny", "continual", MethodRow("later", "no-such-method"), 0, 12)
    bar: Any = Silent()
    with pytest.raises(undrift.DataError, match="no-such-method"):
        Streaming(bench().scaled(request), request)(cell, bar)


def test_weights_that_are_not_there_leave_cells_not_run(tmp_path: Path) -> None:
    request = Request(results=tmp_path, data=tmp_path, only=("source",), seeds=1, device="cpu")
    said: list[str] = []
    outcome = run(bench(), request, said.append, quiet=True)
    assert (outcome.ran, outcome.failed, outcome.left) == (0, 0, 2)
    assert "--wrn2810" in said[0]


def test_unknown_networks_and_settings_are_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no setting 'sideways'"):
        bench().cells(tiny(tmp_path, settings=("sideways",)))
    with pytest.raises(OptionError, match="no network 'vgg'"):
        bench().cells(Request(networks=("vgg",)))


# Streams ------------------------------------------------------------------------------------------------------------

LABELS = torch.tensor([2, 0, 1, 0, 1, 2, 2])


def test_a_continual_stream_has_whole_domains_in_file_order() -> None:
    found = plan(CONTINUAL, ("a", "b"), LABELS, 7, 3, seed=0)
    assert found.image.tolist() == [*range(7), *range(7)]
    assert found.batches == [(0, 3), (3, 6), (6, 7), (7, 10), (10, 13), (13, 14)]
    assert found.domain.tolist() == [0] * 7 + [1] * 7


def test_another_seed_permutes_within_each_domain() -> None:
    found = plan(CONTINUAL, ("a", "b"), LABELS, 7, 3, seed=1)
    first, second = found.image[:7].tolist(), found.image[7:].tolist()
    assert sorted(first) == sorted(second) == list(range(7))
    assert first != second
    assert first != list(range(7))
    assert found.domain.tolist() == [0] * 7 + [1] * 7


def test_a_gradual_stream_goes_up_and_down_in_severity() -> None:
    setting = SETTING["gradual"]
    found = plan(setting, ("a", "b"), LABELS, 7, 7, seed=0)
    kinds = setting.kinds(("a", "b"))
    assert [kinds[found.kind[begin]] for begin, _ in found.batches[:9]] == [("a", s) for s in UP_AND_DOWN]
    assert len(found.batches) == 18


def test_a_mixed_stream_has_every_image_once_and_mixes_domains() -> None:
    found = plan(SETTING["mixed"], ("a", "b"), LABELS, 7, 5, seed=0)
    pairs = set(zip(found.domain.tolist(), found.image.tolist(), strict=True))
    assert len(pairs) == 14
    assert found.batches == [(0, 5), (5, 10), (10, 14)]
    assert len(set(found.domain[:5].tolist())) == 2


@pytest.mark.parametrize("seed", [0, 1])
def test_a_stream_by_classes_is_sorted_by_label(seed: int) -> None:
    found = plan(SETTING["classes"], ("a", "b"), LABELS, 7, 3, seed)
    assert LABELS[found.image[:7]].tolist() == sorted(LABELS.tolist())


def test_cycles_bring_every_corruption_again() -> None:
    setting = StreamSetting("cycles", "", batch=7, cycles=3)
    found = plan(setting, ("a", "b"), LABELS, 7, 7, seed=1)
    assert found.domain.reshape(6, 7).tolist() == [[n] * 7 for n in (0, 1) * 3]
    assert found.cycle.reshape(3, 14).tolist() == [[n] * 14 for n in range(3)]
    orders = [order.tolist() for order in found.image.split(7)]
    assert all(sorted(order) == list(range(7)) for order in orders)
    assert len(set(map(tuple, orders))) == 6  # each in an order of its own


def test_a_long_stream_has_the_error_of_each_cycle(tmp_path: Path) -> None:
    found = record(tmp_path, "norm-stats", settings=("cycles-20",))
    # Nothing is learned, and the images come in one order: every cycle is the first one again.
    assert found["cycles"] == [pytest.approx(found["error"])] * 20
    text = (tmp_path / "online-c10.md").read_text(encoding="utf-8")
    error = f"{100 * found['error']:.2f}"
    assert "| " + " | ".join(["norm-stats", *[error] * 6, "0.00"]) + " |" in text


def test_a_twin_has_the_prior_of_its_mean_and_no_noise() -> None:
    rows = {row.name: row for row in online_rows("cifar10")}
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.LazyLinear(3)
    )
    images = torch.rand(64, 3, 8, 8)
    net(images)
    found = {}
    for name in ("undrift", "undrift-sigma-0", "undrift-light-sigma-0"):
        row, camera = rows[name], [images, images]
        stream = undrift.stream(
            copy.deepcopy(net), iter(camera), method=row.method, views="mirror", gather=64, seed=0, **row.settings
        )
        list(stream)
        model, found[name] = stream.model, stream.latest["kl"]
        with torch.no_grad():
            one, other = (model(images) for _ in range(2))
        assert torch.equal(one, other) == (name != "undrift")
        del stream, model
    assert 0 < found["undrift-sigma-0"] < found["undrift"]  # weights have moved, and are held; variances cost more
    assert found["undrift-light-sigma-0"] == 0


def test_the_file_of_corrupted_images_is_used_again(tmp_path: Path) -> None:
    clean, cpu = tiny_data(Request()), torch.device("cpu")
    made = Corrupted(clean, cpu, tmp_path, None).held([("contrast", 5), ("contrast", 1)], 8)
    assert torch.equal(made[0], undrift.corrupt(clean.images[:8], "contrast", 5))
    assert len(list(tmp_path.iterdir())) == 2
    for file in tmp_path.iterdir():  # what is read is the file, not a new corruption
        content = bytearray(file.read_bytes())
        content[-1] ^= 255
        file.write_bytes(content)
    again = Corrupted(clean, cpu, tmp_path, None).held([("contrast", 5), ("contrast", 1)], 8)
    assert int((again != made).sum()) == 2
    next(tmp_path.iterdir()).write_bytes(b"")
    with pytest.raises(undrift.DataError, match="made again"):
        Corrupted(clean, cpu, tmp_path, None).held([("contrast", 5), ("contrast", 1)], 8)


# Numbers ------------------------------------------------------------------------------------------------------------


def test_scores_on_the_device_are_the_librarys_own() -> None:
    probs, truth = torch.rand(40, 5).softmax(1), torch.randint(0, 5, (40,))
    label = probs.argmax(1)
    probs[3], label[3] = 0.2, -1
    domain = torch.arange(40) % 2
    scoring = Scoring()
    for some in torch.arange(40).split(7):
        scoring.add(probs[some], label[some], truth[some], domain[some])
    for number, scores in scoring.scores().items():
        some = torch.where(label[:, None] < 0, torch.nan, probs)[domain == number]
        (found,) = undrift.evaluate(Given(some), numbered(truth[domain == number])).results
        ours, theirs = (
            {name: value for name, value in asdict(each).items() if value is not None}
            for each in (scores, found.scores)
        )
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert scoring.error() == pytest.approx(float((label != truth).float().mean()))


def test_the_clock_takes_a_sample_after_a_warm_up() -> None:
    clock = Clock(torch.device("cpu"), 3)
    assert [clock(lambda i=i: i) for i in range(3)] == [0, 1, 2]  # type: ignore[misc]
    assert clock.milliseconds is not None
    assert len(clock._times) == 2
    many = Clock(torch.device("cpu"), 1000)
    for _ in range(100):
        many(lambda: None)
    assert len(many._times) == 20


def test_certain_answers_are_counted_batch_by_batch() -> None:
    scoring, truth = Scoring(), torch.tensor([0, 0, 0])
    sure = torch.tensor([[1.0, 0.0], [0.92, 0.08], [0.5, 0.5]])
    scoring.add(sure, torch.tensor([0, 0, 1]), truth, truth)  # expected errors: 0, 0.04, 0.193 of one, two, three
    scoring.add(sure.flip(1), torch.tensor([1, 1, 1]), truth, truth)
    found = scoring.certain()
    assert found["0.01"] == {"coverage": pytest.approx(2 / 6), "error": 0.5}
    assert found["0.05"] == {"coverage": pytest.approx(4 / 6), "error": 0.5}
    scoring = Scoring()
    scoring.add(sure[2:], torch.tensor([1]), truth[:1], truth[:1])
    assert scoring.certain()["0.1"] == {"coverage": 0.0, "error": None}


def test_rows_take_the_variant_of_their_data_set() -> None:
    assert variant("tent", "imagenet") == "tent:imagenet"
    assert variant("source", "imagenet") == "source"
    rows = {row.name: row for row in online_rows("imagenet")}
    assert rows["vmp:paper"].settings == {"stream_optimiser": "sgd", "stream_lr": 1e-4}
    assert rows["tent-matched-lr"].settings == rows["vmp:paper"].settings
    assert rows["vmp-sigma-0.1"].settings["init_fraction"] == 0.1
    assert [row.name for row in rows.values() if row.tier == "B"] == [
        *("eta", "sar", "tent-ft", "cotta", "cotta-8-views", "bacs", "ttt", "bbb")
    ]


def test_an_ablation_changes_one_thing_and_runs_when_it_is_asked_for(tmp_path: Path) -> None:
    rows, request = ablation_rows("cifar10"), tiny(tmp_path)
    base = dict(rows[0].settings)
    for row in rows[1:]:
        undrift.methods.get(row.method, "stream").build(row.settings)
        assert len(set(row.settings.items()) - set(base.items())) == 1
    asked_for = [cell.row for cell in bench().cells(replace(request, only=("ablation",)))]
    assert asked_for == rows
    assert not {row.name for row in rows} & {cell.row.name for cell in bench().cells(request)}
