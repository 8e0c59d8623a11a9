"""Convolutions try algorithms for passes over whole batches, and the process is left as it was."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tree_support import Silent
from undrift_bench.bench import Request, find
from undrift_bench.bench.harness.cell import Cell, MethodRow
from undrift_bench.bench.harness.quickly import by_pass, quickly, trial
from undrift_bench.bench.offline.tiny import TINY
from undrift_bench.bench.offline.views import CentreView, RandomView
from undrift_bench.bench.online.benchmark import OnlineBenchmark
from undrift_bench.bench.online.streaming import Streaming

CPU = torch.device("cpu")


def test_trials_are_for_whole_batches_only() -> None:
    before = torch.backends.cudnn.benchmark
    with quickly(CPU, fast=True):
        assert torch.is_autocast_enabled("cpu")
        found = []
        for images in (64, 25, 64, 640):
            trial(True, images, 64)
            found.append(torch.backends.cudnn.benchmark)
        assert found == [True, False, True, True]
        trial(True, 64, None)
        assert not torch.backends.cudnn.benchmark
    assert torch.backends.cudnn.benchmark == before
    assert not torch.is_autocast_enabled("cpu")
    with quickly(CPU, fast=False):
        trial(False, 64, 64)
        assert not torch.backends.cudnn.benchmark


def test_views_say_it_before_the_network_sees_a_batch() -> None:
    centre = replace(CentreView.of(replace(TINY, resize=None, crop=20), True), usual=4)
    for view in (centre, RandomView(**vars(centre))):
        with quickly(CPU, fast=True):
            for count in (4, 3, 4):
                view(torch.zeros(count, 3, 20, 20, dtype=torch.uint8))
                assert torch.backends.cudnn.benchmark == (count == 4)


Passes = list[tuple[str, int, bool]]
"""Forwards or backwards, how many images, whether algorithms are tried."""


def watched(layer: nn.Module) -> Passes:
    """Return what a layer's passes will have seen."""
    seen: Passes = []

    def note(way: str, values: Tensor) -> None:
        seen.append((way, len(values), torch.backends.cudnn.benchmark))

    def after(_layer: nn.Module, _args: object, output: Tensor) -> None:
        note("forwards", output)
        if output.requires_grad:
            output.register_hook(lambda grad: note("backwards", grad))

    layer.register_forward_hook(after)
    return seen


def test_each_pass_of_a_step_says_what_it_is_of_forwards_and_backwards() -> None:
    net, images = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten()), torch.rand(4, 3, 5, 5)
    seen = watched(net[0])
    by_pass(net, 4)
    with quickly(CPU, fast=False):
        (net(images).sum() + net(images[:3]).square().sum()).backward()
    whole, part = (4, True), (3, False)
    assert seen == [("forwards", *whole), ("forwards", *part), ("backwards", *part), ("backwards", *whole)]


@pytest.mark.parametrize("fast", [True, False])
def test_roids_second_pass_over_a_part_of_its_batch_tries_nothing(fast: bool, tmp_path: Path) -> None:
    request = Request(results=tmp_path, tiny=True, seeds=1, device="cpu", fast=fast)
    benchmark = find("online-c10")
    assert isinstance(benchmark, OnlineBenchmark)
    streaming = Streaming(benchmark.scaled(request), request)
    seen = watched(streaming.network("tiny")[1][0])
    size = streaming(Cell("online-c10", "tiny", "continual", MethodRow("roid", "roid"), 0, 12), Silent())["batch"]
    assert {(way, images < size) for way, images, _ in seen} >= {
        ("forwards", False), ("forwards", True), ("backwards", False), ("backwards", True)
    }  # fmt: skip
    assert all(tried == (fast and images % size == 0) for _, images, tried in seen)
