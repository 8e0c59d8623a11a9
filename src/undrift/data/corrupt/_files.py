"""Files that are there whole or not at all, and a note of what a folder was made from."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import BinaryIO, TypeVar

from undrift._errors import DataError
from undrift.data._tree import choose

from ._constants import CORRUPTIONS, DEVELOPMENT
from ._pictures import frost_pictures

NOTE = "undrift.json"
_T = TypeVar("_T")


@dataclass(frozen=True)
class Written:
    """What a writer did.

    Args:
        made: files or folders written now, relative to `folder`.
        kept: those that an earlier run had finished.
        skipped: images that could not be read, as CLASS/FILE.JPEG.
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
            shutil.rmtree(partial, ignore_errors=True)  # what a killed run left
            partial.mkdir(parents=True)
        yield partials
        for partial, path in zip(partials, paths, strict=True):
            partial.replace(path)
    finally:
        for partial in partials:
            shutil.rmtree(partial, ignore_errors=True)


def note_origin(folder: Path, origin: dict[str, str | int]) -> None:
    """Write down what the folder is made from, or raise if it was begun from something else."""
    path = folder / NOTE
    if path.exists():
        begun = json.loads(path.read_text(encoding="utf-8"))
        other = [f"{key} {begun.get(key)}, now {value}" for key, value in origin.items() if begun.get(key) != value]
        if other:
            raise DataError(
                f"{folder} was begun from something else ({'; '.join(other)}); needed: the same images and seed, as "
                "finished files are kept. Choose another folder, or delete this one."
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write((json.dumps(origin, indent=1) + "\n").encode())


def progress(quiet: bool) -> Callable[[Iterable[_T], str, int], Iterator[_T]]:
    """Return a function that goes through (items, title, total) under a bar, or without one."""
    if quiet:
        return lambda items, title, total: iter(items)  # noqa: ARG005
    from rich.progress import track

    return lambda items, title, total: iter(track(items, f"{title:<18}", total))
