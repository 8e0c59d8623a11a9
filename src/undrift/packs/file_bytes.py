"""The bytes of a domain file: safetensors with a checksum. The layout: docs/reference/format.md."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from undrift._errors import DataError
from undrift.system.version import own_version

VERSION = 3
READABLE = ("1", "2", "3")
_LONGEST_HEADER = 100_000_000  # safetensors' own limit


def to_bytes(tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> bytes:
    """Return a domain file's bytes: a safetensors file with a checksum and a fixed order of its header."""
    content = safetensors.torch.save(dict(tensors))
    start = 8 + int.from_bytes(content[:8], "little")
    table, data = json.loads(content[8:start]), content[start:]
    header = {"__metadata__": {**texts, "checksum": _checksum({"__metadata__": dict(texts), **table}, data)}, **table}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # align tensors to eight bytes
    return len(text).to_bytes(8, "little") + text + data


def _checksum(header: Mapping[str, Any], data: bytes) -> str:
    canonical = json.dumps(header, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(canonical.encode() + data).hexdigest()


def read_bytes(place: Path) -> tuple[bytes, dict[str, str]]:
    """Return a file's bytes and its text header; check the header first, as it may be another, huge file."""
    if place.is_dir():
        raise DataError(f"{place} is a folder; needed: a domain file written by undrift.save. Name the file in it.")
    try:
        with place.open("rb") as file:
            start = file.read(9)
            length = int.from_bytes(start[:8], "little")
            # A safetensors file begins with the length of its header, and the header with a brace.
            if start[8:] != b"{" and (start[:2] == b"PK" or start[:1] == b"\x80"):
                raise DataError(
                    f"{place} is a pickle or a PyTorch file; needed: a domain file written by undrift.save. undrift "
                    "unpickles nothing; if this is the source network's checkpoint, load it into `net` first."
                )
            if start[8:] != b"{" or not 1 < length <= _LONGEST_HEADER:
                raise damaged(place, "it does not begin as a safetensors file does")
            header = file.read(length - 1)
            table = _table(place, b"{" + header)
            data = file.read()
    except FileNotFoundError as error:
        raise DataError(
            f"there is no file {place}; needed: a domain file written by undrift.save. Check the path, or run "
            "`undrift adapt`."
        ) from error
    except OSError as error:
        raise DataError(
            f"{place} cannot be read ({error.strerror or error}); needed: a domain file. Check its permissions."
        ) from error
    texts: dict[str, str] = table["__metadata__"]
    said = texts.pop("checksum", None)
    if said != _checksum(table, data):
        raise damaged(place, "its checksum does not fit: bytes were changed or lost")
    return start + header + data, texts


def _table(place: Path, header: bytes) -> dict[str, Any]:
    """Return the header; raise unless it is that of a domain file in our format."""
    try:
        table: dict[str, Any] = json.loads(header)
        texts = table.get("__metadata__", {})
    except (ValueError, AttributeError, RecursionError) as error:
        raise damaged(place, "its header is cut short or is no JSON") from error
    if not isinstance(texts, dict) or "undrift_format" not in texts:
        raise DataError(
            f"{place} is a safetensors file, but no domain file: its header does not say `undrift_format`. Needed: a "
            "file written by undrift.save. If this is a checkpoint, load it into `net` first."
        )
    if texts["undrift_format"] not in READABLE:
        raise DataError(
            f"{place} has format {texts['undrift_format']}, written by undrift {texts.get('undrift', 'unknown')}; "
            f"this undrift {own_version()} reads formats up to {VERSION}. Update undrift, or run `undrift adapt` again."
        )
    return table


def damaged(place: Path, why: str) -> DataError:
    """Return the error for a file that differs from what `save` wrote."""
    return DataError(
        f"{place} is damaged or cut short ({why}); needed: a whole domain file as undrift.save writes it. Copy it "
        "again from where it was made, or run `undrift adapt` again."
    )
