"""The state of a domain by name: collect it from a perturbed network, and fill it in."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from undrift._errors import DataError, PerturbationMismatch
from undrift.packs.domain_file import COUNTS, LOG_VAR, DomainFile, problem
from undrift.packs.shift import Shift
from undrift.packs.vectors import VAR
from undrift.posterior.extra_modules import extra_state
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.state import forget_noise_seen, weights_moved


def domain_state(model: Perturbed) -> dict[str, Tensor]:
    """Return the tensors of a domain by their names in a domain file: the model's own, not copies."""
    out: dict[str, Tensor] = {s.replace("/", ".") + LOG_VAR: n.log_var for s, n in model.noise.items()}  # type: ignore[misc]
    for slot, change in model.low_rank.items():
        out |= {f"{slot.replace('/', '.')}.{name}": factor for name, factor in change.named_parameters()}
    for held in (*model.norms, *model.trained):
        # Inside off() the adapted tensors are the ones set aside.
        tensors = held.tensors() if model.key.enabled else held.away
        prefix = f"{held.name}." if held.name else ""
        out.update({prefix + name: tensor for name, tensor in tensors.items() if tensor is not None})
    return out | extra_state(model)


def plain_tensors(model: Perturbed) -> dict[str, Tensor]:
    """Return copies of the tensors of a domain as a file holds them: wide, on the CPU, all counts in one row."""
    tensors, counts = {}, []
    for name, tensor in domain_state(model).items():
        if name.endswith(COUNTS):
            counts.append(tensor.detach().cpu().long().view(1))
        else:
            tensors[name] = finite(name, tensor)
    return tensors | ({COUNTS: torch.cat(counts)} if counts else {})


def finite(name: str, tensor: Tensor) -> Tensor:
    """Return a copy of a tensor for the file; raise if its values are none that a file may hold."""
    # Half precision is widened, float64 stays: what is loaded is what was saved, bit for bit.
    wide = torch.promote_types(tensor.dtype, torch.float32)
    copy = tensor.detach().to("cpu", wide).contiguous().clone()
    if wrong := problem(name, copy):
        raise DataError(
            f"{name} {wrong}; needed: finite values. The adaptation diverged, and nothing was written: lower "
            "the learning rate, or go back to an earlier checkpoint."
        )
    return copy


@torch.no_grad()
def fill(
    model: Perturbed, tensors: Mapping[str, Tensor], path: Path, shifts: Mapping[str, Shift] | None = None
) -> None:
    """Copy a domain file into a perturbed network; every name and shape must match.

    Args:
        model: as `perturb` left it: a shift is added to the source weights that it has now.
        tensors: the file's, by name.
        path: the file's, for messages.
        shifts: of the other trained weights.
    """
    shifts = shifts or {}
    state = domain_state(model)
    counts = [name for name in state if name.endswith(COUNTS)]
    needed = {name: tuple(t.shape) for name, t in state.items() if name not in counts}
    if counts:
        needed[COUNTS] = (len(counts),)
    given = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    given |= {name: shift.shape for name, shift in shifts.items()}
    missing = [name for name in needed if name not in given]
    extra = [name for name in given if name not in needed]
    shapes = [
        f"{name} {shape} instead of {needed[name]}"
        for name, shape in given.items()
        if name in needed and shape != needed[name]
    ]
    if missing or extra or shapes:
        found = [_some(missing, "missing"), _some(extra, "unknown"), _some(shapes, "of another shape")]
        raise PerturbationMismatch(
            f"{path.name} does not fit this network: {'; '.join(filter(None, found))}. Needed: exactly the "
            f"{len(needed)} tensors of its perturbation. The file was changed, or the network's class was: use the "
            "code it was learned with, or run `undrift adapt` again."
        )
    if wrong := [name for name in shifts if name.endswith(VAR) and bool((_added(shifts[name], state[name]) < 0).any())]:
        raise DataError(
            f"{path.name} makes variances of {wrong[0]} negative; needed: none below 0. The file was changed: copy it "
            "again from where it was made, or run `undrift adapt` again."
        )
    for name, count in zip(counts, tensors.get(COUNTS, ()), strict=True):
        state[name].copy_(count)
    for name in needed.keys() - {COUNTS}:
        value = state[name]
        value.copy_(tensors[name] if name in tensors else _added(shifts[name], value))
    forget_noise_seen(model)


def _added(shift: Shift, value: Tensor) -> Tensor:
    return shift.to(value.device).added_to(value)


def _some(names: list[str], what: str) -> str:
    shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return f"{len(names)} {what} ({shown})" if names else ""


def check_fill_start(model: Perturbed, file: DomainFile) -> None:
    """Raise where `fill_start` would leave out weights that a domain file holds, or their shapes differ."""
    state = domain_state(model)
    given = {name: tuple(t.shape) for name, t in file.tensors.items() if not name.endswith((LOG_VAR, COUNTS))}
    given |= {name: shift.shape for name, shift in file.shifts.items()}
    if wrong := [name for name, shape in given.items() if name not in state or tuple(state[name].shape) != shape]:
        raise PerturbationMismatch(
            f"{file.path.name} holds {_some(wrong, 'tensors')} that this stream does not train; needed: a pack "
            'of the same kind. Name the method that made it, such as method="undrift" for one with weights, or leave '
            "the pack out."
        )


@torch.no_grad()
def fill_start(model: Perturbed, file: DomainFile) -> None:
    """Fill what a domain file holds into a network at its start; what it does not hold stays the source's."""
    for name, value in domain_state(model).items():
        if name in file.tensors and file.tensors[name].shape == value.shape:
            value.copy_(file.tensors[name])
        elif name in file.shifts:
            value.copy_(_added(file.shifts[name], value))
    weights_moved()
    forget_noise_seen(model)
