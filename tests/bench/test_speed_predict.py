"""The time of predictions: each way once a batch, over a noise-free pass, by a clock that is a stand-in."""

import time
from typing import Any

import pytest
import torch
from torch import nn

from undrift.bench import speed_predict
from undrift.bench.predict_page import TIMES
from undrift.bench.predict_page import WAYS as TITLES

CPU = torch.device("cpu")


def test_a_median_is_of_the_calls_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now, taken = [0.0], iter([100.0, 50.0, 1.0, 5.0, 2.0])
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def ask() -> None:
        now[0] += next(taken)

    assert speed_predict.median(ask, CPU, low=False, repeats=3, settling=2) == 2.0


def test_each_way_is_measured_once_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, passes, seen = [], list[int](), {}
    monkeypatch.setattr(speed_predict, "median", lambda ask, **_how: float(len([ask()])))
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    net[1].register_forward_pre_hook(lambda _layer, args: passes.append(len(args[0])))
    for row in speed_predict.times(net, CPU, [3], low=False, repeats=1):
        rows.append(row)
        seen[row["way"]] = list(passes)
        passes.clear()
    assert [row["way"] for row in rows] == list(TITLES)
    assert {way for way, _ in TIMES} <= set(TITLES)
    assert seen["full, folded"][-2:] == [3, 30]  # after one of each: the noise-free pass, and ten draws in one
    assert seen["full, one pass a draw"] == [3] * 10
    assert 6 <= sum(seen["fast"]) <= 9
    assert seen["samples=0"] == [3]
    assert all(row["ratio"] == 1.0 and row["forward_ms"] == 1e3 for row in rows)


def test_predictions_come_from_a_process_with_their_network(monkeypatch: pytest.MonkeyPatch) -> None:
    from undrift.bench import speed_measure

    asked: list[Any] = []
    monkeypatch.setattr(speed_measure, "prediction_times", lambda *given: asked.append(given[1:]) or [{"ratio": 2.0}])
    job = {"network": "digits", "batches": [4], "low": False, "repeats": 1, "settling": 0}
    assert list(speed_measure.predictions(job, CPU)) == [{"network": "digits", "low": False, "ratio": 2.0}]
    assert asked == [(CPU, [4], False, 1, 0)]
