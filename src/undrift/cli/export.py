"""`undrift export`: the adapted mean network for other programs."""

from pathlib import Path
from typing import Annotated, Any

import typer

from undrift._errors import OptionError
from undrift.cli.flags import takes
from undrift.cli.image_arguments import Root, first_images
from undrift.cli.model_arguments import ModelFlags, Opened, open_adapted, open_source, weights_of
from undrift.cli.output_paths import Force, claim
from undrift.cli.session import Session, command


@command
@takes(ModelFlags, "model", "The network")
def run(
    session: Session,
    domain: Annotated[Path, typer.Option("--pack", "--domain", help="What `undrift adapt` wrote.", metavar="FILE")],
    out: Annotated[Path, typer.Option(help="A .safetensors, .pt2 or .onnx.", metavar="FILE")],
    model: dict[str, Any],
    format: Annotated[  # noqa: A002
        str | None,
        typer.Option(
            help="state_dict, torch.export (a program) or onnx; default: as --out ends.",
            metavar="NAME",
            show_default=False,
        ),
    ] = None,
    example: Annotated[
        str | None,
        typer.Option(help="Images to trace with, if their size is unknown.", metavar="PATH"),
    ] = None,
    images: Annotated[
        str | None,
        typer.Option(help="Take norm statistics from these images of the domain.", metavar="PATH"),
    ] = None,
    root: Root = Path(),
    force: Force = False,
) -> dict[str, Any]:
    """Write the adapted network for other programs.

    The file computes what `undrift predict --samples 0` answers, without noise and so without mutual information.

    Example: undrift export --weights net.pt --pack b.safetensors --out c.onnx
    """
    from undrift.packs.export import export, format_of

    format = format or format_of(out)  # noqa: A001
    claim((out,), force, (domain, weights_of(model)))
    opened = open_source(session, model, root, domain)
    adapted = open_adapted(opened, domain, seed=0)
    traced = _example(opened, example) if format in ("torch.export", "onnx") else None
    seen = None if images is None else opened.reader.images(images)
    export(adapted, out, format, traced, seen)  # type: ignore[arg-type]  # it says what is wrong with another format
    session.kept = f"{out} was written whole."
    return {"wrote": [session.wrote(out)], "format": format}


def _example(opened: Opened, path: str | None) -> Any:
    """Return two images to trace with: from `path`, or blank ones of the size that the preprocessing gives."""
    import torch

    from undrift.posterior.batch import to_device

    if path is not None:
        return to_device(first_images(opened.reader.images(path), 2), opened.source.network)
    size = opened.preprocess.crop or opened.preprocess.resize
    if size is None or (isinstance(size, int) and opened.preprocess.crop is None):
        raise OptionError(
            "the size of the network's images is unknown; needed: an image to trace the network with. Give one with "
            "--example image.png, or --crop SIZE."
        )
    height, width = (size, size) if isinstance(size, int) else size
    return to_device(torch.zeros(2, opened.preprocess.channels, height, width), opened.source.network)
