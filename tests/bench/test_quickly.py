"""Convolutions try algorithms for one batch size, and the process is left as it was."""

from dataclasses import replace

import torch

from undrift.bench.offline_tiny import TINY
from undrift.bench.offline_views import CentreView, RandomView
from undrift.bench.quickly import quickly, trial

CPU = torch.device("cpu")


def test_trials_are_for_the_usual_size_only():
    before = torch.backends.cudnn.benchmark
    with quickly(CPU, fast=True):
        assert torch.is_autocast_enabled("cpu")
        found = []
        for images in (64, 25, 64, 256):
            trial(True, images, 64)
            found.append(torch.backends.cudnn.benchmark)
        assert found == [True, False, True, False]
        trial(True, 64, None)
        assert not torch.backends.cudnn.benchmark
    assert torch.backends.cudnn.benchmark == before
    assert not torch.is_autocast_enabled("cpu")
    with quickly(CPU, fast=False):
        trial(False, 64, 64)
        assert not torch.backends.cudnn.benchmark


def test_views_say_it_before_the_network_sees_a_batch():
    centre = replace(CentreView.of(replace(TINY, resize=None, crop=20), True), usual=4)
    for view in (centre, RandomView(**vars(centre))):
        with quickly(CPU, fast=True):
            for count in (4, 3, 4):
                view(torch.zeros(count, 3, 20, 20, dtype=torch.uint8))
                assert torch.backends.cudnn.benchmark == (count == 4)
