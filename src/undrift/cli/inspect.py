"""`undrift inspect`: what a file of undrift holds."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from undrift.cli._places import Force, claim
from undrift.cli._session import Session, command


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
    from undrift import plots
    from undrift._domain_file import inspect
    from undrift._errors import DataError
    from undrift.train import read_header

    claim((plot,), force, (file,))
    try:
        found = inspect(file)
    except DataError as error:
        if "undrift_format" not in str(error):
            raise
        try:
            header = read_header(file)
        except DataError:
            raise error from None
        if plot is not None:
            raise DataError(f"{file} is a source model, which has no σ; needed: a domain file for --plot.") from None
        facts = {**dataclasses.asdict(header), "preprocess": header.preprocess.to_dict()}
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
