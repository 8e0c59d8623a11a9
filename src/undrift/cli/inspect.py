"""`undrift inspect`: what a file of undrift holds."""

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
    file: Annotated[Path, typer.Argument(help="A domain file, or a source model of `undrift train`.")],
    plot: Annotated[Path | None, typer.Option(help="Draw σ per layer into this picture.", metavar="FILE.png")] = None,
    force: Force = False,
) -> dict[str, Any]:
    """Show what a domain file (or a source model) holds.

    A table of σ per layer: its mean, its range, its ℓ1 norm, and how large it is against the kernel's own deviation.

    Example: undrift inspect clinic-b.safetensors --plot sigma.png
    """
    from undrift._errors import DataError
    from undrift.cli.extensions import extensions
    from undrift.judge import plots
    from undrift.packs.domain_file import inspect

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
            raise DataError(f"{file} is a source model, which has no σ; needed: a domain file for --plot.") from None
        session.say("\n".join(f"{name:<12} {value}" for name, value in facts.items()))
        return {"kind": "source model", **facts}
    if plot is not None:
        plots.sigma(found, plot)  # before the first line, as in adapt
    session.say(str(found))
    result: dict[str, Any] = {
        "kind": "domain file",
        "path": found.path,
        "bytes": found.size,
        "undrift": found.undrift,
        "fingerprint": found.fingerprint,
        "source": found.source,
        "options": found.options.as_dict(),
        "preprocess": None if found.preprocess is None else found.preprocess.to_dict(),
        "classes": found.classes,
        "layers": [dataclasses.asdict(row) for row in found.sigmas],
    }
    if plot is not None:
        result["wrote"] = [session.wrote(plot)]
    return result


def _described(file: Path, extensions: "Iterable[Extension]") -> dict[str, Any] | None:
    """Return what the first extension that knows the file says of it."""
    from undrift._errors import DataError

    for extension in extensions:
        with suppress(DataError):
            return extension.describe_file(file)
    return None
