"""`undrift inspect`: show what a file of undrift holds."""

import dataclasses
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from undrift.cli.output_paths import Force, claim
from undrift.cli.session import Session, command

if TYPE_CHECKING:
    from undrift.cli.extensions import Extension


@command
def run(
    session: Session,
    file: Annotated[Path, typer.Argument(help="Domain file, or file of `undrift train`.")],
    plot: Annotated[Path | None, typer.Option(help="Draw σ per layer.", metavar="FILE.png")] = None,
    force: Force = False,
) -> dict[str, Any]:
    """Show what a domain file (or a source model) holds.

    Prints σ per layer: mean, range, ℓ1 norm, and its size relative to the kernel's standard deviation.

    Example: undrift inspect b.safetensors --plot sigma.png
    """
    from undrift._errors import DataError
    from undrift.cli.extensions import extensions
    from undrift.judge import plots
    from undrift.packs.domain_file import inspect
    from undrift.packs.shift import described as describe

    claim((plot,), force, (file,))
    try:
        found = inspect(file)
    except DataError as error:
        if "undrift_format" not in str(error):
            raise
        facts = _described(file, extensions())
        if facts is None:
            raise
        if plot is not None:
            raise DataError(
                f"{file} is a source model, which has no σ; needed for --plot: a domain file. Name one."
            ) from None
        session.say("\n".join(f"{name:<12} {value}" for name, value in facts.items()))
        return {"kind": "source model", **facts}
    if plot is not None:
        plots.sigma(found, plot)  # before printing, as in adapt
    session.say(str(found))
    result: dict[str, Any] = {
        "kind": "domain file",
        "path": found.path,
        "bytes": found.size,
        "undrift": found.undrift,
        "fingerprint": found.fingerprint,
        "source": found.source,
        "name": found.name,
        "facts": found.facts,
        "mean": {name: describe(part) for name, part in found.shifts.items() if len(part.shape) > 1},
        "options": found.options.as_dict(),
        "preprocess": None if found.preprocess is None else found.preprocess.to_dict(),
        "classes": found.classes,
        "layers": [dataclasses.asdict(row) for row in found.sigmas],
    }
    if plot is not None:
        result["wrote"] = [session.wrote(plot)]
    return result


def _described(file: Path, extensions: "Iterable[Extension]") -> dict[str, Any] | None:
    """Return the description by the first extension that can read the file, or None."""
    from undrift._errors import DataError

    for extension in extensions:
        with suppress(DataError):
            return extension.describe_file(file)
    return None
