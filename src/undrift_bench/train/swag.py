"""Train a few more epochs at a constant rate and collect the iterates into a posterior (SWAG, as PETAL does)."""

from __future__ import annotations

import copy

import torch
from torch import nn

from undrift.images import Domain
from undrift.keep.posterior import Moments
from undrift.system.validate import pick_device
from undrift_bench.train.checks import check_domain
from undrift_bench.train.epoch import Loop, own_randomness
from undrift_bench.train.frames import frames
from undrift_bench.train.options import TrainOptions

# PETAL's, but that our SGD looks ahead (Nesterov).
SWAG = TrainOptions(epochs=5, batch_size=200, lr=0.01, schedule="constant", held_out=0)


def collect_moments(
    network: nn.Module,
    domain: Domain,
    options: TrainOptions = SWAG,
    *,
    first: int = 2,
    device: torch.device | str = "auto",
    workers: int | None = None,
) -> Moments:
    """Return mean and variance of the weights over epoch ends of further source training; the network stays as it is.

    Args:
        network: a trained source network; a copy of it is trained on.
        domain: the labelled source images, with the network's preprocessing.
        options: how; five epochs at 0.01 without a schedule.
        first: the first epoch whose end counts; PETAL's four of five.
        device: "auto" takes a GPU where there is one.
        workers: processes that decode images.
    """
    place = pick_device(device)
    net = copy.deepcopy(network).to(place)
    moments = Moments(net)
    with own_randomness(options.seed, place):
        loop = Loop(net, frames(check_domain(domain, None), place, options.pad, workers), None, options)
        for epoch in range(options.epochs):
            loop.run(epoch, lambda: None)
            if epoch + 1 >= first:
                moments.add(net)
    return moments
