"""Save the state of a run of `adapt` as one safetensors file: tensors and a JSON header, nothing to unpickle.

The file is written whole or not at all. `identity` in the header says which run it belongs to: another network, other
options or other data cannot resume from it.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from undrift._errors import DataError, PerturbationMismatch
from undrift.system.atomic import write_bytes

FORMAT = "undrift adapt 1"


@dataclass
class Checkpoint:
    """Named groups of tensors, and plain values.

    Attributes:
        identity: what has to be the same for a run to resume, by name.
        values: JSON values.
        groups: tensors by group ("model", "optimiser", …) and name.
    """

    identity: dict[str, Any]
    values: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the file, whole or not at all."""
        tensors = {
            f"{group}/{name}": tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
            for group, members in self.groups.items()
            for name, tensor in members.items()
        }
        header = {
            "undrift": FORMAT,
            "identity": json.dumps(self.identity),
            "values": json.dumps(self.values, allow_nan=False),
        }
        write_bytes(path, safetensors.torch.save(tensors, header))


def read(path: str | os.PathLike[str], identity: Mapping[str, Any]) -> Checkpoint | None:
    """Return the checkpoint of this run, or None if there is no file; raise on the file of another run.

    Args:
        path: where `Checkpoint.write` wrote it.
        identity: that of the run that wants to resume.
    """
    if not Path(path).exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dict
        if header.get("undrift") != FORMAT:
            raise DataError(_facts(path, f"it says {header.get('undrift')!r} where {FORMAT!r} is written"))
        found = Checkpoint(json.loads(header["identity"]), json.loads(header["values"]))
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise DataError(_facts(path, str(error) or type(error).__name__)) from error
    _compare(path, found.identity, identity)
    for name, tensor in tensors.items():
        group, _, member = name.partition("/")
        found.groups.setdefault(group, {})[member] = tensor
    return found


def _facts(path: str | os.PathLike[str], found: str) -> str:
    return (
        f"{path} is not a checkpoint that adapt can read ({found}); needed: a whole file that this version of undrift "
        "wrote. Give another path, or delete the file to start over."
    )


def _compare(path: str | os.PathLike[str], theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    # As JSON gives it back: a tuple is a list there.
    plain = json.loads(json.dumps(ours))
    differences = [
        f"{name} {_short(theirs.get(name))} there, {_short(value)} here"
        for name, value in plain.items()
        if theirs.get(name) != value
    ]
    if differences:
        raise PerturbationMismatch(
            f"{path} is the checkpoint of another run ({'; '.join(differences[:4])}); a run resumes only with the same "
            "network, options, data and epochs. Use those, give another path, or delete the file to start over."
        )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:12] + "…"
