"""Small networks and options drawn by hypothesis."""

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

SIZE = 6


@st.composite
def networks(draw: st.DrawFn) -> nn.Module:
    """Draw a classifier of images: one to three convolutions with their norm layers, then a head."""
    torch.manual_seed(draw(st.integers(0, 10**6)))
    layers: list[nn.Module] = []
    channels = 3
    for _ in range(draw(st.integers(1, 3))):
        width = draw(st.sampled_from([4, 6, 8]))
        groups = draw(st.sampled_from([1, 1, 2])) if channels % 2 == 0 else 1
        kernel = draw(st.sampled_from([1, 3]))
        bias = draw(st.booleans())
        layers.append(
            nn.Conv2d(channels, width, kernel, draw(st.integers(1, 2)), kernel // 2, groups=groups, bias=bias)
        )
        layers += draw(st.sampled_from([[], [nn.BatchNorm2d(width)], [nn.GroupNorm(2, width)]]))
        layers.append(draw(st.sampled_from([nn.ReLU(), nn.GELU()])))
        channels = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    if draw(st.booleans()):
        layers += [nn.Linear(channels, 7), nn.LayerNorm(7), nn.ReLU()]
        channels = 7
    layers.append(nn.Linear(channels, draw(st.integers(2, 5))))
    return nn.Sequential(*layers).eval()


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    """Draw choices that change the noise, the prior or the norm layers."""
    return {
        "conv_sharing": draw(st.sampled_from(["kernel", "weight"])),
        "linear_sharing": draw(st.sampled_from(["kernel", "weight"])),
        "estimator": draw(st.sampled_from(["local", "drawn"])),
        "prior": draw(st.sampled_from(["adaptive", "isotropic"])),
        "init_fraction": draw(st.sampled_from([0.0, 0.01, 0.3])),
        "energy": draw(st.sampled_from(["square", "offset", "centred"])),
        "first_energy": draw(st.sampled_from(["square", "centred"])),
        "norm_statistics": draw(st.sampled_from(["source", "train", "moving"])),
        "norm_affine": draw(st.booleans()),
    }


def pictures(count: int, seed: int) -> Tensor:
    return torch.rand(count, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(seed))
