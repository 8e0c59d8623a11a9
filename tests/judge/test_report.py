"""A report reads well, comes back from JSON, and adds up."""

import dataclasses
import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

import undrift
from faults import full_disk
from undrift import Report, join


def result(domain: str, accuracy: float, role: str = "target", task: str = "", **scores: float) -> Any:
    """Return a result as a report's file holds it."""
    chosen = {"count": 1000, "accuracy": accuracy, "nll": 0.5, "brier": 0.25, "ece": 0.125, "aurc": 0.0625}
    bins = {"counts": [0, 4, 16], "confidence": [0.0, 0.5, 0.9], "accuracy": [0.0, 0.25, 0.75]}
    values = {"domain": domain, "scores": {**chosen, "augrc": 0.05, **scores}, "reliability": bins, "risks": [0.0, 0.2]}
    report = {
        "undrift_report": 1,
        "setting": "offline",
        "results": [{**values, "role": role, "task": task}],
        "about": {},
    }
    with TemporaryDirectory() as folder:
        Path(folder, "r.json").write_text(json.dumps(report))
        return Report.load(Path(folder, "r.json")).results[0]


def offline() -> Report:
    return Report("offline", (result("fog", 0.9), result("snow", 0.7)), {"samples": 10})


def generalized() -> Report:
    pairs = (("A → B", 0.8, 0.6), ("A → C", 0.6, 0.9))
    results = [(result("source", s, "source", t), result("target", a, "target", t)) for t, s, a in pairs]
    return Report("generalized", tuple(r for pair in results for r in pair))


def continual() -> Report:
    clean = (result("source", 0.95, "source before"), result("source", 0.9, "source"))
    return Report("continual", (clean[0], *offline().results, clean[1]))


def test_offline_table() -> None:
    assert str(offline()) == (
        "domain  images  error %    NLL  Brier  ECE %  AURC × 100\n"
        "────────────────────────────────────────────────────────\n"
        "fog      1,000    10.00  0.500  0.250  12.50        6.25\n"
        "snow     1,000    30.00  0.500  0.250  12.50        6.25\n"
        "────────────────────────────────────────────────────────\n"
        "mean              20.00  0.500  0.250  12.50        6.25"
    )


def test_generalized_table() -> None:
    lines = str(generalized()).splitlines()
    # 2·0.8·0.6/1.4 = 0.6857, 2·0.6·0.9/1.5 = 0.72; means 0.7 and 0.75: 2·0.7·0.75/1.45 = 0.7241.
    assert lines[2].split() == ["A", "→", "B", "80.00", "60.00", "68.57", "0.500", "12.50", "6.25"]
    assert lines[5].split() == ["mean", "70.00", "75.00", "70.29", "0.500", "12.50", "6.25"]
    assert lines[6].split()[-1] == "72.41"
    assert generalized().summary["harmonic_of_means"] == pytest.approx(0.7241, abs=1e-4)
    assert generalized().summary["mean_of_harmonics"] == pytest.approx(0.7029, abs=1e-4)


def test_continual_table() -> None:
    text = str(continual())
    assert "source, before   1,000     5.00" in text
    assert "source, after    1,000    10.00" in text
    assert text.endswith("forgetting: +5.00 points of error on the source domain after the stream")
    assert continual().summary["error"] == pytest.approx(0.2)


def test_unanswered_images_are_said() -> None:
    one = result("fog", 0.5, count=10, unanswered=3)
    held_out = dataclasses.replace(one, role="source")
    for setting in ("offline", "generalized", "continual"):
        text = str(Report(setting, (one, held_out)))
        assert text.endswith("6 images got no answer (NaN) and count as wrong")


@pytest.mark.parametrize("make", [offline, generalized, continual])
def test_json_round_trip(tmp_path: Path, make: "type[Report]") -> None:
    report = make()
    size = report.save(tmp_path / "r.json")
    assert size == (tmp_path / "r.json").stat().st_size
    again = Report.load(tmp_path / "r.json")
    assert again == report
    assert str(again) == str(report)
    assert json.loads((tmp_path / "r.json").read_text())["summary"] == pytest.approx(report.summary)


@pytest.mark.parametrize("make", [offline, generalized, continual])
def test_a_report_that_was_saved_without_selective_scores(tmp_path: Path, make: "type[Report]") -> None:
    values = make().to_dict()
    for each in values["results"]:
        del each["risks"], each["scores"]["aurc"], each["scores"]["augrc"]
    (tmp_path / "old.json").write_text(json.dumps(values))
    old = Report.load(tmp_path / "old.json")
    assert not {"aurc", "augrc"} & old.summary.keys()
    assert {"aurc", "augrc"} < make().summary.keys()
    assert [line.split()[-1] for line in str(old).splitlines() if "0.500" in line] == ["–"] * str(old).count("0.500")
    old.save(tmp_path / "again.json")
    assert Report.load(tmp_path / "again.json") == old


def test_what_is_no_report(tmp_path: Path) -> None:
    place = tmp_path / "r.json"
    with pytest.raises(undrift.DataError, match="cannot be read"):
        Report.load(place)
    values = offline().to_dict()
    for broken in (
        "{",
        "[]",
        "{}",
        json.dumps({**values, "undrift_report": 2}),
        json.dumps({**values, "setting": "other"}),
        json.dumps({**values, "results": [{"domain": "a"}]}),
        json.dumps({**values, "results": [{**values["results"][0], "role": "judge"}]}),
    ):
        place.write_text(broken)
        with pytest.raises(undrift.DataError, match=r"is no report.*Run the evaluation again"):
            Report.load(place)


def test_a_full_disk(tmp_path: Path) -> None:
    offline().save(tmp_path / "r.json")
    before = (tmp_path / "r.json").read_text()

    with full_disk(), pytest.raises(undrift.DataError, match="disk is full"):
        continual().save(tmp_path / "r.json")
    assert (tmp_path / "r.json").read_text() == before


def test_join() -> None:
    parts = [Report("generalized", generalized().results[i : i + 2]) for i in (0, 2)]
    assert join(parts) == generalized()
    with pytest.raises(undrift.DataError, match="nothing cannot be joined"):
        join([])
    with pytest.raises(undrift.DataError, match="offline, generalized cannot be joined"):
        join([offline(), generalized()])
    with pytest.raises(undrift.DataError, match=r"fog is in two"):
        join([offline(), offline()])
    with pytest.raises(undrift.DataError, match="no results"):
        _ = Report("offline", ()).summary


def test_a_folders_name_need_not_be_utf8(tmp_path: Path) -> None:
    odd = os.fsdecode(b"caf\xe9")
    report = Report("offline", (result(odd, 0.9), result("Šibenik", 0.7)))
    report.save(tmp_path / "r.json")
    assert Report.load(tmp_path / "r.json") == report
