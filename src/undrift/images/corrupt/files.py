"""Write files and folders whole or not at all, with a note of what a folder was made from."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from undrift._errors import DataError
from undrift.images.corrupt.constants import CORRUPTIONS, DEVELOPMENT
from undrift.images.corrupt.pictures import frost_pictures
from undrift.images.tree import choose

NOTE = "undrift.json"
_T = TypeVar("_T")


@dataclass(frozen=True)
class Written:
    """The result of a writer.

    Args:
        made: files or folders written now, relative to `folder`.
        kept: those that an earlier run had finished.
        skipped: images that could not be read, now or by an earlier run, as CLASS/FILE.JPEG.
    """

    folder: Path
    made: tuple[str, ...]
    kept: tuple[str, ...]
    skipped: tuple[str, ...] = ()


def check_names(names: Sequence[str], frost: str | PathLike[str] | None) -> None:
    """Raise unless every name is a corruption and frost has its pictures: before the first file, not after hours."""
    for name in names:
        choose(name, (*CORRUPTIONS, *DEVELOPMENT), "corruption")
    if "frost" in names:
        frost_pictures(None if frost is None else Path(frost), 1, 1, 1)


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that takes its name once it is complete; after an error nothing is left."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def whole_folders(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """Yield empty folders that take their names once all are complete; after an error nothing is left."""
    partials = [path.with_name(f".{path.name}.partial") for path in paths]
    try:
        for partial in partials:
            shutil.rmtree(partial, ignore_errors=True)  # left by a killed run
            partial.mkdir(parents=True)
        yield partials
        for partial, path in zip(partials, paths, strict=True):
            partial.replace(path)
    finally:
        for partial in partials:
            shutil.rmtree(partial, ignore_errors=True)


def note_origin(folder: Path, origin: Mapping[str, Any]) -> None:
    """Note what the folder is made from; raise if it was begun from something else.

    Entries that the note lacks (such as the frost pictures) are added.
    """
    begun = read_note(folder)
    other = [
        f"{key} {begun[key]}, now {value}" for key, value in origin.items() if key in begun and begun[key] != value
    ]
    if other:
        raise DataError(
            f"{folder} was begun from something else ({'; '.join(other)}); needed: the same images, seed and device, "
            "as finished files are kept. Choose another folder, or delete this one."
        )
    _write_note(folder, begun, {**begun, **origin})


def note_skipped(folder: Path, names: Iterable[str]) -> tuple[str, ...]:
    """Note images that could not be read, with those of earlier runs, and return them all."""
    begun = read_note(folder)
    skipped = sorted({*begun.get("skipped", ()), *names})
    _write_note(folder, begun, {**begun, "skipped": skipped} if skipped else begun)
    return tuple(skipped)


def note_sheet(folder: Path, sheet: Path, origin: Mapping[str, Any]) -> None:
    """Note which contact sheet was drawn beside the folder, and from what, as `note_origin` does.

    A run that continues with the folder overwrites this file only, as others may be somebody else's.
    """
    note_origin(folder, origin)
    begun = read_note(folder)
    _write_note(folder, begun, {**begun, "sheet": str(sheet.resolve())})


def read_note(folder: Path) -> dict[str, Any]:
    """Return the folder's note; empty without one, as in a new folder."""
    path = folder / NOTE
    try:
        note = json.loads(path.read_bytes()) if path.exists() else {}
        if not isinstance(note, dict) or not isinstance(note.get("skipped", []), list):
            raise ValueError("other content")
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path} is damaged ({error}); needed: the note of what the folder is made from, as finished files are "
            "kept. Choose another folder, or delete this one."
        ) from error
    return note


def _write_note(folder: Path, before: dict[str, Any], note: dict[str, Any]) -> None:
    if note != before:
        folder.mkdir(parents=True, exist_ok=True)
        with whole_file(folder / NOTE) as file:
            file.write((json.dumps(note, indent=1) + "\n").encode())


def progress(quiet: bool) -> Callable[[Iterable[_T], str, int], Iterator[_T]]:
    """Return a function that goes through (items, title, total) under a bar, or without one."""
    if quiet:
        return lambda items, title, total: iter(items)  # noqa: ARG005
    from rich.progress import track

    return lambda items, title, total: iter(track(items, f"{title:<18}", total))
