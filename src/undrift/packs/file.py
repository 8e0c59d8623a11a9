"""Save and load one domain as one small file. The layout: docs/reference/format.md."""

import datetime
import json
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from undrift._errors import OptionError, UndriftError
from undrift.packs.compatible import check_path, check_source
from undrift.packs.compression import DEFAULT, EXACT, compressor, mean_shifts
from undrift.packs.domain_file import LOG_VAR, DomainFile, inspect, sigmas
from undrift.packs.file_bytes import VERSION, to_bytes
from undrift.packs.fingerprint import fingerprint
from undrift.packs.sections import ROUTER, Sections, checked_facts
from undrift.packs.state import domain_state, fill, finite, plain_tensors
from undrift.packs.vectors import rounded, vector_shifts
from undrift.perturb import perturb
from undrift.posterior.extra_modules import add_saved_extra
from undrift.posterior.perturbed import Perturbed
from undrift.posterior.refuse import refuse_second
from undrift.system.atomic import check, write_bytes
from undrift.system.validate import a_type, instead_of
from undrift.system.version import own_version
from undrift.system.warning import warn

if TYPE_CHECKING:
    from undrift.images.preprocess import Preprocess


def save(
    model: Perturbed,
    path: str | os.PathLike[str],
    *,
    source: str | os.PathLike[str] | None = None,
    mean: str = DEFAULT,
    name: str | None = None,
) -> int:
    """Write what was learned about one domain, and return the file's size in bytes.

    One safetensors file with log-variances, norm affine and statistics, options, preprocessing, class names and the
    source network's fingerprint, but not the source weights. Of weights that were trained (option `train`) it holds the
    compressed shift, or two factors (option `mean_rank`); vectors and weights of fewer than 4,096 values are exact. It
    is written whole or not at all.

    The file also holds `model.facts`, JSON values by name, with the day (UTC) of the first save as `created`; `adapt`
    and `stream` put the number of `images` there. And it holds `model.router`, float or int8 tensors by name, for
    the router. `inspect` and `load` return both.

    Args:
        model: a perturbed network.
        path: where to; an existing file is replaced at the last moment.
        source: a name for the source network (or the path of its checkpoint), for people to read.
        mean: how trained weights are stored: in so many bits each on average, such as "1-bit" or "1.5-bit"; "ternary"
            or "signs" of one step per kernel; as "rank-8" (or another); or "exact" for bit for bit. "auto" is 1.5-bit,
            and 4-bit where fewer than a million weights are trained. What each costs in accuracy:
            docs/explanation/packs.md.
        name: of the pack. Default: the file's name without its ending.

    Raises:
        DataError: the adapted state holds NaN, or the file cannot be written.
        OptionError: the path or a name is no text, a fact or class name cannot be stored, or `mean` is unknown.

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
            f"got {a_type(model)}; undrift.save needs a perturbed network. "
            + instead_of(model, "Make one: undrift.perturb(net).")
        )
    if model._removed:
        raise UndriftError("this perturbation was removed; what it learned is no longer in use. Save before remove().")
    check_path(path)
    check(path)
    compressor(mean)
    model.settle()  # a plain pass that Ctrl-C stopped has not
    exact = plain_tensors(model)  # first, as it says where a state diverged
    texts, facts = header(model, source), facts_of(model, name)
    router = {
        key: tensor.cpu().contiguous() if tensor.dtype == torch.int8 else finite(ROUTER + key, tensor)
        for key, tensor in model.router.items()
    }
    shifts = mean_shifts(model, mean)
    kept = {key: tensor for key, tensor in exact.items() if key not in shifts}
    if mean != EXACT and (vectors := vector_shifts(model, kept)):
        kept = {key: _log_var(key, tensor) for key, tensor in kept.items() if key not in vectors}
        shifts |= vectors
    tensors, entries = Sections(kept, shifts, router, facts).written()
    return write_bytes(path, to_bytes(tensors, texts | {key: as_json(value) for key, value in entries.items()}))


def load(
    net: nn.Module,
    path: str | os.PathLike[str],
    *,
    generator: torch.Generator | None = None,
    preprocess: "Preprocess | None" = None,
) -> Perturbed:
    """Return the network adapted to the domain that a file was learned on.

    Everything is checked before the network is changed; after an error it is as before, bit for bit.

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
        >>> import tempfile, undrift
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     size = save(perturb(net, init_fraction=0.04), folder + "/b.safetensors", source="my checkpoint")
        ...     try:
        ...         load(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), folder + "/b.safetensors")
        ...     except undrift.PerturbationMismatch as error:
        ...         print("my checkpoint" in str(error))
        True
    """
    if not isinstance(net, nn.Module):
        raise UndriftError(
            f"got {a_type(net)}; undrift.load needs a torch.nn.Module. {instead_of(net, 'Give it the source network.')}"
        )
    check_path(path)
    refuse_second(net)
    file = inspect(path)
    check_source(net, file)
    if preprocess is not None and file.preprocess is not None and (lines := file.preprocess.differences(preprocess)):
        # Before the network is perturbed, as a warning may be an error.
        warn(
            f"{file.path.name} was learned with other preprocessing than yours ({'; '.join(lines)}; the file's first). "
            "Predictions will be wrong without any error: use model.preprocess, or adapt again with yours."
        )
    return adapted_by(net, file, generator, preprocess)


def adapted_by(
    net: nn.Module,
    file: DomainFile,
    generator: torch.Generator | None = None,
    preprocess: "Preprocess | None" = None,
) -> Perturbed:
    """Return the network adapted by a domain file that belongs to it."""
    kept = file.preprocess or preprocess
    model = perturb(net, file.options, generator=generator, preprocess=kept, classes=file.classes)
    try:
        known = domain_state(model)
        add_saved_extra(model, {name: tensor for name, tensor in file.tensors.items() if name not in known})
        fill(model, file.tensors, file.path, file.shifts)
        model.facts, model.router = dict(file.facts), dict(file.router)
    except BaseException:
        model.remove()
        raise
    return model


def _log_var(name: str, tensor: Tensor) -> Tensor:
    return rounded(tensor) if name.endswith(LOG_VAR) else tensor


def header(model: Perturbed, source: str | os.PathLike[str] | None) -> dict[str, str]:
    """Return the header without the entries of `Sections`."""
    relative = {s.layer: [float(f"{v:.4g}") for v in s.relative] for s in sigmas(model)}
    values = {
        "options": model.options.as_dict(),
        "preprocess": None if model.preprocess is None else model.preprocess.to_dict(),
        "classes": None if model.classes is None else _names(model.classes),
        "relative_std": relative,
    }
    texts = {"undrift_format": str(VERSION), "undrift": own_version(), "fingerprint": fingerprint(model)}
    if source is not None:
        texts["source"] = _readable(source)
    return texts | {key: as_json(value) for key, value in values.items()}


def as_json(value: object) -> str:
    """Return a value as compact JSON; raise ValueError for NaN."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def facts_of(model: Perturbed, name: str | None) -> dict[str, Any]:
    """Return the facts that a file records of itself."""
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    facts: dict[str, Any] = {"created": today, **model.facts, **({} if name is None else {"name": name})}
    try:
        text = as_json(checked_facts(facts))
        text.encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise OptionError(
            f"model.facts or the name cannot be stored ({error}); needed: a name of whole characters and JSON values "
            "by name, `images` a whole number and `estimate` a finite one. Correct them, and save again."
        ) from error
    return facts


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
            f"source={source!r} is {a_type(source)}; needed: a name for the source network, or the path of "
            "its checkpoint. Give text, or leave it out."
        )
    return name.encode(errors="backslashreplace").decode()  # a path may hold bytes that are no UTF-8
