"""Parts of a domain file beside plain tensors: compressed shifts, the router's tensors, facts, constant rows."""

import datetime
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from undrift.packs import shift, vectors
from undrift.packs.shift import Shift
from undrift.packs.vectors import VectorShift

SHIFT = ".shift."
ROUTER = "router/"
VECTORS = "vectors"


@dataclass(frozen=True)
class Sections:
    """The parts of a domain file, by name.

    Attributes:
        tensors: log-variances, norm state and exact weights.
        shifts: compressed shifts of trained weights, and of vectors.
        router: tensors for a router, without their prefix.
        facts: what the file says of itself, as JSON values.
    """

    tensors: Mapping[str, Tensor]
    shifts: Mapping[str, Shift]
    router: Mapping[str, Tensor]
    facts: Mapping[str, Any]

    def written(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors of the file, and the entries of its header as JSON values."""
        tensors, rows = dict(self.tensors), {}
        for name, tensor in self.tensors.items():
            if tensor.ndim > 1 and tensor.numel() > len(tensor) and _same_in_rows(tensor):
                tensors[name], rows[name] = tensor.flatten(1)[:, 0].contiguous(), list(tensor.shape)
        entries: dict[str, Any] = {"facts": dict(self.facts), "rows": rows}
        changes = {name: part.change for name, part in self.shifts.items() if isinstance(part, VectorShift)}
        if changes:
            whole = {name: tensors.pop(name) for name in list(tensors) if _joins(name, tensors[name])}
            tensors[VECTORS], entries[VECTORS] = vectors.row_of({**changes, **whole})
        shifts = {name: part for name, part in self.shifts.items() if name not in changes}
        for name, part in shifts.items():
            tensors.update({name + SHIFT + own: tensor for own, tensor in part.stored().items()})
        tensors.update({ROUTER + name: tensor for name, tensor in self.router.items()})
        entries["shifts"] = {name: shift.described(part) for name, part in shifts.items()}
        return tensors, {name: value for name, value in entries.items() if value}

    @classmethod
    def read(cls, tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> "Sections":
        """Return the parts of a file; raise ValueError, KeyError or TypeError where they do not fit together."""
        left = dict(tensors)
        rows, entries, facts = (json.loads(header.get(name, "{}")) for name in ("rows", "shifts", "facts"))
        found = vectors.vectors_of(left.pop(VECTORS), json.loads(header[VECTORS])) if VECTORS in header else {}
        left |= {name: own for name, own in found.items() if name.endswith(vectors.LOG_VAR)}
        for name, shape in rows.items():
            if left[name].shape != (shape[0],) or min(shape) < 1:
                raise ValueError(f"{name} holds {left[name].numel()} numbers for rows of {shape}")
            left[name] = left[name].view(-1, *[1] * (len(shape) - 1)).expand(shape)
        shifts: dict[str, Shift] = {
            name: shift.read({"kind": VectorShift.kind, "shape": list(own.shape)}, {"change": own})
            for name, own in found.items()
            if name not in left
        }
        for name, entry in entries.items():
            own = {key.removeprefix(name + SHIFT): key for key in left if key.startswith(name + SHIFT)}
            stored = {part: left.pop(key) for part, key in own.items()}
            try:
                shifts[name] = shift.read(entry, stored)
            except ValueError as error:
                raise ValueError(f"the shift of {name}: {error}") from error
        router = {key.removeprefix(ROUTER): left.pop(key) for key in list(left) if key.startswith(ROUTER)}
        return cls(left, shifts, router, checked_facts(facts))


def _joins(name: str, tensor: Tensor) -> bool:
    """Return whether a tensor has its own values in the row of vectors."""
    return name.endswith(vectors.LOG_VAR) and tensor.ndim == 1 and tensor.dtype == torch.float32


def _same_in_rows(tensor: Tensor) -> bool:
    """Return whether each row of a tensor holds one number: variances of a layer that were never trained."""
    flat = tensor.flatten(1)
    return bool((flat == flat[:, :1]).all())


def checked_facts(facts: Any) -> dict[str, Any]:
    """Return facts; raise ValueError where one that undrift reads is of another kind."""
    if not isinstance(facts, dict) or not all(isinstance(name, str) for name in facts):
        raise ValueError(f"facts are {type(facts).__name__}, not values by name")
    name, created, images, estimate = (facts.get(key) for key in ("name", "created", "images", "estimate"))
    if name is not None and not (isinstance(name, str) and name.strip()):
        raise ValueError(f"name={name!r} is no name")
    if images is not None and (isinstance(images, bool) or not isinstance(images, int) or images < 0):
        raise ValueError(f"images={images!r} is not a number of images")
    if estimate is not None and not (isinstance(estimate, int | float) and math.isfinite(estimate)):
        raise ValueError(f"estimate={estimate!r} is not a number")
    if created is not None:
        datetime.date.fromisoformat(created)
    return facts
