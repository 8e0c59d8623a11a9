"""Check where a command may write before it does any work, so that no result is lost at the end."""

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer

from undrift._errors import DataError, OptionError
from undrift.system.atomic import check, sweep
from undrift.system.lock import held

Force = Annotated[bool, typer.Option("--force", help="Replace existing files.")]


def claim(
    outputs: Iterable[Path | None],
    force: bool,
    inputs: Iterable[Path | None] = (),
    going_on: Iterable[Path | None] = (),
) -> None:
    """Raise unless every output can be written, and delete temporary files that killed commands left beside them.

    An output needs an existing folder. It may replace an existing file with `force` only, and never an input or
    another output.

    Args:
        going_on: outputs that may exist, because a run resumes from them.
    """
    sources = {Path(os.path.realpath(path)) for path in inputs if path is not None}
    taken: set[Path] = set()
    for paths, may_exist in ((going_on, True), (outputs, force)):
        for path in paths:
            if path is None:
                continue
            place = check(path)
            if place in sources or place in taken:
                what = "one of the inputs" if place in sources else "named for two outputs"
                raise OptionError(f"{path} is {what}; needed: a file of its own to write to. Choose another name.")
            taken.add(place)
            if place.exists() and not may_exist:
                raise there_already(path)
            if not os.access(place.parent, os.W_OK):
                raise _no_folder(place, "may not be written to")
    for place in taken:
        sweep(place)


@contextmanager
def alone(path: Path | None) -> Iterator[None]:
    """Hold the lock of a file for a `with` block; raise if another process holds it.

    Delete temporary files that a killed process left beside it.
    """
    if path is None:
        yield
        return
    place = check(path)
    with ExitStack() as stack:
        try:
            mine = stack.enter_context(held(place.with_name(f".{place.name}.lock")))
        except OSError as error:
            raise _no_folder(place, f"takes no new file ({error.strerror})") from error
        if not mine:
            raise another_process(path)
        sweep(place)
        yield


def another_process(path: Path) -> DataError:
    """Return the error of a file that another process is writing to."""
    return DataError(
        f"another process is writing {path}; needed: one process per file. Wait for it, stop it, or choose another "
        "name."
    )


def there_already(path: Path) -> DataError:
    """Return the error of an output that exists."""
    return DataError(
        f"{path} is there already; needed: a new name, so that nothing is lost. Choose another name, or give --force "
        "to replace it and lose what it holds."
    )


def check_pack(path: Path | None) -> None:
    """Raise if a domain file is to have another ending: `undrift packs` and `--pack FOLDER` would overlook it."""
    if path is not None and path.suffix != ".safetensors":
        raise OptionError(
            f"--out {path} does not end in .safetensors; needed: the name of a domain file, as in b.safetensors. "
            "Rename it."
        )


def beside(path: Path, ending: str) -> Path:
    """Return the name of a companion file: clinic-b.safetensors has clinic-b.history.json."""
    return path.with_name(path.name.removesuffix(path.suffix) + ending)


def _no_folder(place: Path, what: str) -> DataError:
    return DataError(
        f"{place.parent} {what}; needed: a folder for {place.name}. Choose another folder, or change its permissions."
    )
