"""Adapted networks and their domain file that the tests of files share."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

import undrift
from support import convnet, images, learnables
from undrift import save
from undrift.images import Preprocess


def adapted(net: nn.Module, **options: Any) -> undrift.Perturbed:
    """Return a perturbed network whose every learnable and statistic has moved."""
    model = undrift.perturb(net, generator=torch.Generator().manual_seed(1), **options)
    with torch.no_grad():
        model(images(seed=3).to(next(net.parameters()).dtype))
        for parameter in learnables(model).values():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


def saved_file(folder: Path) -> tuple[nn.Module, Path]:
    """Return a source network and the domain file that was learned on it."""
    net = convnet()
    model = adapted(net, preprocess=Preprocess())
    save(model, folder / "clinic-b.safetensors", source="convnet-clinic-A")
    return model.remove(), folder / "clinic-b.safetensors"
