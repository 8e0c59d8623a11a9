"""The text header of a domain file. Its entries: docs/reference/format.md."""

import datetime
import json
import os
from collections.abc import Iterable
from typing import Any

from undrift._errors import OptionError
from undrift.packs.domain_file import sigmas
from undrift.packs.file_bytes import VERSION
from undrift.packs.fingerprint import fingerprint
from undrift.packs.sections import checked_facts
from undrift.posterior.perturbed import Perturbed
from undrift.system.validate import a_type
from undrift.system.version import own_version


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
