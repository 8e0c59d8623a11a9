"""Save and load one domain as one small file. The layout: docs/reference/format.md."""

import json
import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from undrift._errors import DataError, OptionError, PerturbationMismatch, UndriftError, UndriftWarning
from undrift.packs.domain_file import COUNTS, LOG_VAR, DomainFile, inspect, problem, short, sigmas
from undrift.packs.fingerprint import HALF, fingerprint, precision_of, source_tensors
from undrift.packs.packing import VERSION, pack, written_by
from undrift.perturb import perturb
from undrift.posterior.added import add_missing, added_state
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.refuse import refuse_second
from undrift.posterior.state import filled_in
from undrift.system.atomic import check, write_bytes

if TYPE_CHECKING:
    from undrift.images.preprocess import Preprocess


def save(model: Perturbed, path: str | os.PathLike[str], *, source: str | os.PathLike[str] | None = None) -> int:
    """Write what was learned about one domain, and return the file's size in bytes.

    One safetensors file with log-variances, norm affine and statistics, options, preprocessing, class names and the
    source network's fingerprint, but not the source weights. Weights that were trained (option `train`) are included:
    whole, or as two factors (option `mean_rank`).
    It is written whole or not at all.

    Args:
        model: a perturbed network.
        path: where to; an existing file is replaced at the last moment.
        source: a name for the source network (or the path of its checkpoint), for people to read.

    Raises:
        DataError: the adapted state holds NaN, or the file cannot be written.
        OptionError: the path or the source's name is no text, or a class name cannot be stored.

    Examples:
        >>> import tempfile
        >>> model = perturb(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     size = save(model, folder + "/clinic-b.safetensors")
        >>> size < 5000
        True
    """
    if not isinstance(model, Perturbed):
        raise UndriftError(
            f"got a {type(model).__name__}; undrift.save needs a perturbed network. Make one: undrift.perturb(net)."
        )
    if model._removed:
        raise UndriftError("this perturbation was removed; what it learned is no longer in use. Save before remove().")
    _check_path(path)
    check(path)
    header = _header(model, source)
    tensors: dict[str, Tensor] = {}
    counts = []
    for name, tensor in domain_state(model).items():
        if name.endswith(COUNTS):
            counts.append(tensor.detach().cpu().long().view(1))
            continue
        # Half precision is widened, float64 stays: what is loaded is what was saved, bit for bit.
        wide = torch.promote_types(tensor.dtype, torch.float32)
        tensors[name] = tensor.detach().to("cpu", wide).contiguous().clone()
        if wrong := problem(name, tensors[name]):
            raise DataError(
                f"{name} {wrong}; needed: finite values. The adaptation diverged, and nothing was written: lower "
                "the learning rate, or go back to an earlier checkpoint."
            )
    if counts:
        tensors[COUNTS] = torch.cat(counts)
    return write_bytes(path, pack(tensors, header))


def load(
    net: nn.Module,
    path: str | os.PathLike[str],
    *,
    generator: torch.Generator | None = None,
    preprocess: "Preprocess | None" = None,
) -> Perturbed:
    """Return the network adapted to the domain that a file was learned on.

    Everything is checked before the network is touched; after an error it is unchanged, bit for bit.

    Args:
        net: the source network, with the weights that the file was learned on.
        path: a file written by `save`.
        generator: makes the noise reproducible.
        preprocess: what you do to images; a warning names each difference from the file's.

    Raises:
        PerturbationMismatch: the file was learned on another network.
        DataError: the file is missing, damaged, of another format, or no domain file at all.
        OptionError: the path is no text.

    Examples:
        >>> import tempfile
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     size = save(perturb(net, init_fraction=0.04), folder + "/b.safetensors", source="my checkpoint")
        ...     try:
        ...         load(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), folder + "/b.safetensors")
        ...     except PerturbationMismatch as error:
        ...         print("my checkpoint" in str(error))
        True
    """
    if not isinstance(net, nn.Module):
        raise UndriftError(
            f"got a {type(net).__name__}; undrift.load needs a torch.nn.Module. Give it the source network."
        )
    _check_path(path)
    refuse_second(net)
    file = inspect(path)
    _check_source(net, file)
    if preprocess is not None and file.preprocess is not None and (lines := file.preprocess.differences(preprocess)):
        # Before the network is perturbed, as a warning may be an error.
        warnings.warn(
            f"{file.path.name} was learned with other preprocessing than yours ({'; '.join(lines)}; the file's first). "
            "Predictions will be wrong without any error: use model.preprocess, or adapt again with yours.",
            UndriftWarning,
            stacklevel=2,
        )
    kept = file.preprocess or preprocess
    model = perturb(net, file.options, generator=generator, preprocess=kept, classes=file.classes)
    try:
        known = domain_state(model)
        add_missing(model, {name: tensor for name, tensor in file.tensors.items() if name not in known})
        fill(model, file.tensors, file.path)
    except BaseException:
        model.remove()
        raise
    return model


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
    return out | added_state(model)


@torch.no_grad()
def fill(model: Perturbed, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Copy a domain file's tensors into a perturbed network; every name and shape must match."""
    state = domain_state(model)
    counts = [name for name in state if name.endswith(COUNTS)]
    needed = {name: tuple(t.shape) for name, t in state.items() if name not in counts}
    if counts:
        needed[COUNTS] = (len(counts),)
    missing = [name for name in needed if name not in tensors]
    extra = [name for name in tensors if name not in needed]
    shapes = [
        f"{name} {tuple(tensor.shape)} instead of {needed[name]}"
        for name, tensor in tensors.items()
        if name in needed and tuple(tensor.shape) != needed[name]
    ]
    if missing or extra or shapes:
        found = [_some(missing, "missing"), _some(extra, "unknown"), _some(shapes, "of another shape")]
        raise PerturbationMismatch(
            f"{path.name} does not fit this network: {'; '.join(filter(None, found))}. Needed: exactly the "
            f"{len(needed)} tensors of its perturbation. The file was changed, or the network's class was: use the "
            "code it was learned with, or run `undrift adapt` again."
        )
    for name, count in zip(counts, tensors.get(COUNTS, ()), strict=True):
        state[name].copy_(count)
    for name in needed.keys() - {COUNTS}:
        state[name].copy_(tensors[name])
    filled_in(model)


def _check_path(path: object) -> None:
    if not isinstance(path, str | os.PathLike):
        raise OptionError(
            f"the path of the domain file is {path!r}, a {type(path).__name__}; needed: text, or a pathlib.Path. Give "
            "its name, such as 'clinic-b.safetensors'."
        )


def _header(model: Perturbed, source: str | os.PathLike[str] | None) -> dict[str, str]:
    relative = {s.layer: [float(f"{v:.4g}") for v in s.relative] for s in sigmas(model)}
    values = {
        "options": model.options.as_dict(),
        "preprocess": None if model.preprocess is None else model.preprocess.to_dict(),
        "classes": None if model.classes is None else _names(model.classes),
        "relative_std": relative,
    }
    texts = {"undrift_format": str(VERSION), "undrift": written_by(), "fingerprint": fingerprint(model)}
    if source is not None:
        texts["source"] = _readable(source)
    return {**texts, **{k: json.dumps(v, ensure_ascii=False, separators=(",", ":")) for k, v in values.items()}}


def _names(classes: Iterable[object]) -> list[str]:
    names = [str(name) for name in classes]
    if broken := [name for name in names if name.encode(errors="replace").decode() != name]:
        raise OptionError(
            f"the class name {broken[0]!a} holds half a character (of a folder whose name is not UTF-8, perhaps), "
            "which no file can hold; needed: whole Unicode characters. Correct model.classes, and save again."
        )
    return names


def _readable(source: object) -> str:
    name = os.fspath(source) if isinstance(source, os.PathLike) else source
    if not isinstance(name, str):
        raise OptionError(
            f"source={source!r} is a {type(source).__name__}; needed: a name for the source network, or the path of "
            "its checkpoint. Give text, or leave it out."
        )
    return name.encode(errors="backslashreplace").decode()  # a path may hold bytes that are no UTF-8


def _check_source(net: nn.Module, file: DomainFile) -> None:
    own = fingerprint(net)
    if own == file.fingerprint:
        return
    named = f'the checkpoint named in its metadata ("{file.source}")' if file.source else "the one it belongs to"
    remedy = f"Load {named}, or run `undrift adapt` again."
    if (cast := precision_of(net, file.fingerprint)) is not None:
        remedy = f"It fits this network in {cast}: cast first, net.to({cast}), and load after."
    elif half := next((t.dtype for t in source_tensors(net).values() if t.dtype in HALF), None):
        # It may be the right network, but the weights before rounding are unknown.
        remedy += f" These weights are in {half}; if they were cast to it, which rounds them: load first, cast after."
    raise PerturbationMismatch(
        f"{file.path.name} was learned on a different source model (fingerprint {short(file.fingerprint)}, this "
        f"model is {short(own)}). {remedy}"
    )


def _some(names: list[str], what: str) -> str:
    shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return f"{len(names)} {what} ({shown})" if names else ""
