"""`undrift corrupt`: clean images in, CIFAR-10-C or ImageNet-C and a contact sheet out."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from undrift._errors import DataError, OptionError
from undrift.cli.image_arguments import Root, data_set, first_images
from undrift.cli.output_paths import Force, claim
from undrift.cli.session import Session, command
from undrift.cli.shared_arguments import Seed

if TYPE_CHECKING:
    from undrift.images import Domain


@command
def run(
    session: Session,
    images: Annotated[str, typer.Argument(help="cifar10, cifar100, imagenet, tree or tar.")],
    out: Annotated[Path | None, typer.Option(help="The folder to fill, such as CIFAR-10-C.", metavar="FOLDER")] = None,
    name: Annotated[
        list[str] | None, typer.Option(help="A corruption, such as fog; repeat it.", metavar="NAME")
    ] = None,
    severity: Annotated[
        list[int] | None, typer.Option(help="1 to 5 (ImageNet-C); repeat it.", min=1, max=5, metavar="N")
    ] = None,
    sheet: Annotated[
        Path | None, typer.Option(help="Draw one image under every corruption.", metavar="FILE.png")
    ] = None,
    seed: Seed = 0,
    frost: Annotated[
        Path | None,
        typer.Option(help="Frost pictures. Default: the imagecorruptions package's.", metavar="FOLDER", hidden=True),
    ] = None,
    device: Annotated[
        str, typer.Option(help="auto, cpu or cuda; CPU and GPU draw different noise.", metavar="NAME", hidden=True)
    ] = "cpu",
    root: Root = Path(),
    force: Force = False,
) -> dict[str, Any]:
    """Make CIFAR-10-C or ImageNet-C from clean images, in their published layouts.

    Keeps finished files, so the same command resumes a stopped run.

    Example: undrift corrupt cifar10 --root data --out CIFAR-10-C --name fog
    """
    from undrift.images import TensorDomain
    from undrift.images import domain as plain_images
    from undrift.images.corrupt import CORRUPTIONS, SEVERITIES, contact_sheet, write_cifar_c, write_imagenet_c
    from undrift.images.corrupt.files import check_names, note_sheet, read_note
    from undrift.system.validate import pick_device

    if out is None and sheet is None:
        raise OptionError(
            "neither --out nor --sheet was given; needed: something to write. Name a folder or a picture."
        )
    # An earlier run may have drawn the sheet of this folder; the folder's note says so.
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
        check_names(names, frost)  # before the sheet is drawn, which creates the folder
        if severity and isinstance(domain, TensorDomain):
            raise OptionError(
                "--severity was given for CIFAR-C, whose files hold all five; needed: no --severity. Leave it out."
            )
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
    session.kept = f"Finished files in {out} stay; the same command resumes from them."
    quiet = session.quiet or session.as_json  # the bar goes to stdout, which JSON has for itself
    how: dict[str, Any] = {"seed": seed, "device": place, "frost": frost, "quiet": quiet}
    if isinstance(domain, TensorDomain):
        written = write_cifar_c(domain, out, names, **how)
    else:
        written = write_imagenet_c(domain, out, names, severities=severity or SEVERITIES, **how)
    session.say(
        f"{written.folder}: {len(written.made)} made, {len(written.kept)} kept, {len(written.skipped)} images skipped"
    )
    return {**result, "folder": out, "made": written.made, "kept": written.kept, "skipped": written.skipped}


def _photographs(path: str) -> "Domain":
    """Return a tree or tar with one folder per class, resized and cropped as ImageNet's images are."""
    from undrift.cli.label_arguments import tree
    from undrift.images import IMAGENET

    return data_set("imagenet", Path(path)) or tree(path, IMAGENET)


def _first(domain: "Domain") -> Any:
    import torch

    from undrift.images.preprocess import RAW

    return (first_images(domain.prepared(RAW), 1)[0] * 255).round().to(torch.uint8)
