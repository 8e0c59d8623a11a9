"""Where a command may write: looked at before any work is done, so that no result is lost at the end."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from undrift._atomic import check
from undrift._errors import DataError, OptionError

Force = Annotated[bool, typer.Option("--force", help="Replace output files that exist.")]


def claim(
    outputs: Iterable[Path | None],
    force: bool,
    inputs: Iterable[Path | None] = (),
    going_on: Path | None = None,
) -> None:
    """Raise unless every output can be written: to a folder that is there, over nothing (or with --force), and not over
    an input or another output.

    Args:
        going_on: one more output, which may be there already: a run goes on from it.
    """  # noqa: D205
    sources = {Path(os.path.realpath(path)) for path in inputs if path is not None}
    taken: set[Path] = set()
    for path in (going_on, *outputs):
        if path is None:
            continue
        place = check(path)
        if place in sources or place in taken:
            what = "one of the inputs" if place in sources else "named for two outputs"
            raise OptionError(f"{path} is {what}; needed: a file of its own to write to. Choose another name.")
        taken.add(place)
        if place.exists() and not force and path is not going_on:
            raise DataError(
                f"{path} is there already; needed: a new name, so that nothing is lost. Choose another name, or "
                "replace it with --force."
            )
        if not os.access(place.parent, os.W_OK):
            raise DataError(
                f"{place.parent} may not be written to; needed: a folder for {place.name}. Choose another folder, or "
                "change its permissions."
            )


def beside(path: Path, ending: str) -> Path:
    """Return the name of a companion: clinic-b.safetensors has clinic-b.history.json."""
    return path.with_name(path.name.removesuffix(path.suffix) + ending)
