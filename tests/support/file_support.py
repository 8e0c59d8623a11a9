"""Adapted networks and their domain file that the tests of files share."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

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


def packed(tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> bytes:
    """Return a domain file's bytes, with the checksum as docs/reference/format.md has it."""
    given = {name: text for name, text in texts.items() if name != "checksum"}
    content = safetensors.torch.save(dict(tensors), given)
    start = 8 + int.from_bytes(content[:8], "little")
    table, data = json.loads(content[8:start]), content[start:]
    canonical = json.dumps(table, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode()
    return safetensors.torch.save(dict(tensors), {**given, "checksum": hashlib.sha256(canonical + data).hexdigest()})
