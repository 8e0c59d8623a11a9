"""The time of predictions: each way once a turn, over a noise-free pass, by a clock that is a stand-in."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import undrift
from undrift_bench.bench.speed import measure as speed_measure
from undrift_bench.bench.speed import predict
from undrift_bench.bench.speed.predict_page import TIMES
from undrift_bench.bench.speed.predict_page import WAYS as TITLES

CPU = torch.device("cpu")


def network(passes: list[int]) -> nn.Module:
    """Return a small network that notes how many images each of its passes has."""
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    net[1].register_forward_pre_hook(lambda _layer, args: passes.append(len(args[0])))
    return net


def test_medians_are_of_the_turns_that_count() -> None:
    ways, taken = len(predict.WAYS), iter(range(100))
    model = undrift.perturb(network([]))
    x = torch.rand(1, 3, 2, 2)
    found = predict.medians(model, x, False, repeats=3, settling=2, clock=lambda *_: float(next(taken) ** 2))
    # Numbers come in turns: the fourth of five is the middle one of the last three.
    assert found == [float((3 * (1 + ways) + place) ** 2) for place in range(1 + ways)]


def test_every_turn_has_a_noise_free_pass_and_each_way_once() -> None:
    passes, seen = list[int](), list[list[int]]()

    def lap(ask: Callable[[], object], _device: torch.device, _low: bool) -> float:
        passes.clear()
        ask()
        seen.append(list(passes))
        return 1.0

    rows = list(predict.times(network(passes), CPU, [3], low=False, repeats=1, settling=1, clock=lap))
    assert [row["way"] for row in rows] == list(TITLES)
    assert {way for way, _ in TIMES} <= set(TITLES)
    for plain, folded, apart, fast, mean in (seen[:5], seen[5:]):
        assert (plain, folded, apart, mean) == ([3], [30], [3] * 10, [3])
        assert 6 <= sum(fast) <= 9
    assert all(row["ratio"] == 1.0 and row["forward_ms"] == 1e3 for row in rows)


def test_a_lap_is_one_call_in_its_own_precision() -> None:
    seen = list[bool]()

    def ask() -> None:
        time.sleep(0.02)
        seen.append(torch.is_autocast_enabled("cpu"))

    assert all(0.02 <= predict.lap(ask, CPU, low) < 2 for low in (True, False))
    assert seen == [True, False]


def test_predictions_come_from_a_process_with_their_network(monkeypatch: pytest.MonkeyPatch) -> None:
    from undrift_bench.bench.speed import measure

    asked: list[Any] = []
    monkeypatch.setattr(speed_measure, "prediction_times", lambda *given: asked.append(given[1:]) or [{"ratio": 2.0}])
    job = {"network": "digits", "batches": [4], "low": False, "repeats": 1, "settling": 0}
    assert list(measure.predictions(job, CPU)) == [{"network": "digits", "low": False, "ratio": 2.0}]
    assert asked == [(CPU, [4], False, 1, 0)]
