"""`undrift corrupt`: clean images in, CIFAR-10-C or ImageNet-C out, and a contact sheet."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from undrift._errors import DataError, OptionError
from undrift.cli.image_arguments import Root, data_set, first_images
from undrift.cli.output_paths import Force, claim
from undrift.cli.session import Session, command

if TYPE_CHECKING:
    from undrift.images import Domain


@command
def run(
    session: Session,
    images: Annotated[
        str,
        typer.Argument(
            help="cifar10, cifar100 or imagenet (see --root); an ImageNet tree or tar; for --sheet an image."
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="The folder to fill, such as CIFAR-10-C.", metavar="FOLDER")] = None,
    name: Annotated[
        list[str] | None, typer.Option(help="A corruption, such as fog; repeat it. Default: the fifteen.")
    ] = None,
    severity: Annotated[
        list[int] | None, typer.Option(help="1 to 5; repeat it. Default: all. ImageNet-C only.", min=1, max=5)
    ] = None,
    sheet: Annotated[
        Path | None, typer.Option(help="Draw the first image under the fifteen × five here.", metavar="FILE.png")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of every corruption.", min=0)] = 0,
    frost: Annotated[
        Path | None,
        typer.Option(help="Folder of frost pictures. Default: the imagecorruptions package.", metavar="FOLDER"),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda; they draw different noise.")] = "cpu",
    root: Root = Path(),
    force: Force = False,
) -> dict[str, Any]:
    """Make CIFAR-10-C or ImageNet-C from clean images, in their published layouts.

    A file or folder that is complete is not made again: stopped, the same command goes on.

    Example: undrift corrupt cifar10 --root data --out CIFAR-10-C --name fog --name frost
    """
    from undrift.images import TensorDomain
    from undrift.images import domain as plain_images
    from undrift.images.corrupt import CORRUPTIONS, SEVERITIES, contact_sheet, write_cifar_c, write_imagenet_c
    from undrift.images.corrupt.files import check_names, note_sheet, read_note
    from undrift.system.device import pick_device

    if out is None and sheet is None:
        raise OptionError("neither --out nor --sheet was given; needed: what to write. Name a folder or a picture.")
    # Of a folder that is gone on with, the sheet may have been drawn by an earlier run: its note says which.
    drawn = (
        not (sheet is None or out is None or force)
        and sheet.is_file()
        and read_note(out).get("sheet") == str(sheet.resolve())
    )
    claim((None if drawn else sheet,), force)
    if out is not None and out.is_file():
        raise DataError(f"{out} is a file; needed: a folder to fill, which may be new. Choose another name.")
    domain: Domain | None = None if Path(images).exists() else data_set(images, root)
    if domain is None:
        domain = _photographs(images) if out is not None else plain_images(images)
    names = name or CORRUPTIONS
    if out is not None:
        check_names(names, frost)  # before the sheet, whose note begins the folder
        if severity and isinstance(domain, TensorDomain):
            raise OptionError("--severity is for ImageNet-C; CIFAR-C's files hold all five. Leave it out.")
    result: dict[str, Any] = {"wrote": []}
    if sheet is not None and drawn:
        session.say(f"{sheet}: kept")
    elif sheet is not None:
        contact_sheet(_first(domain), sheet, seed=seed, frost=frost)
        result["wrote"].append(session.wrote(sheet))
        if out is not None:
            note_sheet(out, sheet, {"source": domain.name, "seed": seed})
    if out is None:
        return result
    place = pick_device(device)
    session.kept = f"What is complete in {out} stays; the same command goes on from there."
    if isinstance(domain, TensorDomain):
        written = write_cifar_c(domain, out, names, seed=seed, device=place, frost=frost, quiet=_silent(session))
    else:
        written = write_imagenet_c(
            domain,
            out,
            names,
            severities=severity or SEVERITIES,
            seed=seed,
            device=place,
            frost=frost,
            quiet=_silent(session),
        )
    session.say(
        f"{written.folder}: {len(written.made)} made, {len(written.kept)} kept, {len(written.skipped)} images skipped"
    )
    return {**result, "folder": out, "made": written.made, "kept": written.kept, "skipped": written.skipped}


def _photographs(path: str) -> "Domain":
    """Return a tree or tar with one folder per class, resized and cropped as ImageNet's images are."""
    from undrift.cli.label_arguments import tree
    from undrift.images import IMAGENET

    return data_set("imagenet", Path(path)) or tree(path, IMAGENET)


def _silent(session: Session) -> bool:
    # Its bar goes to stdout, where JSON is alone.
    return session.quiet or session.as_json


def _first(domain: "Domain") -> Any:
    import torch

    from undrift.images.preprocess import RAW

    return (first_images(domain.prepared(RAW), 1)[0] * 255).round().to(torch.uint8)
