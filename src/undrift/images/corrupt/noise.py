"""Noise corruptions: gaussian, shot, impulse; speckle for development."""

from __future__ import annotations

import torch
from torch import Tensor

from undrift.images.corrupt.constants import Constants
from undrift.images.corrupt.draws import Draws


def gaussian_noise(x: Tensor, c: Constants, draws: Draws) -> Tensor:
    """Return x + c·ε, ε ~ N(0, 1) per value."""
    return x + draws.normal(*x.shape[1:]).mul_(c[0])


def shot_noise(x: Tensor, c: Constants, draws: Draws) -> Tensor:
    """Return Poisson(c·x) / c: photon counts when full brightness is c photons."""
    return draws.poisson(x * c[0]) / c[0]


def impulse_noise(x: Tensor, c: Constants, draws: Draws) -> Tensor:
    """Return x with a fraction c of its values replaced, half by 0 and half by 1."""
    chance = draws.uniform(*x.shape[1:])
    x = torch.where(chance < c[0] / 2, torch.zeros_like(x), x)
    return torch.where(chance >= 1 - c[0] / 2, torch.ones_like(x), x)


def speckle_noise(x: Tensor, c: Constants, draws: Draws) -> Tensor:
    """Return x + x·c·ε, ε ~ N(0, 1) per value."""
    return x + draws.normal(*x.shape[1:]).mul_(c[0]).mul_(x)
