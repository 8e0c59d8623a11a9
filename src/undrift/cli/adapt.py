"""`undrift adapt`: unlabelled images in, a domain file out."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from undrift.cli._flags import takes
from undrift.cli._images import Root, hold_if_small, open_images, skipped_of
from undrift.cli._likelihood import LikelihoodFlags, make_likelihood
from undrift.cli._model import ModelFlags, open_source, try_out
from undrift.cli._places import Force, beside, claim
from undrift.cli._session import Session, command
from undrift.options import Options, resolve


@command
@takes(Options, "options", "The method (docs/options.md)", names={"adapt_lr": "--lr"})
@takes(LikelihoodFlags, "likelihood", "What is asked")
@takes(ModelFlags, "model", "The network")
def run(
    session: Session,
    images: Annotated[str, typer.Argument(help="A folder, .tar, .txt list, .npy, an image, or a data set's name.")],
    out: Annotated[Path, typer.Option(help="The domain file to write: NAME.safetensors.", metavar="FILE")],
    model: dict[str, Any],
    likelihood: dict[str, Any],
    options: dict[str, Any],
    preset: Annotated[str, typer.Option(help="Options to start from: paper or released.")] = "paper",
    epochs: Annotated[int, typer.Option(help="Passes over the images.", min=1)] = 15,
    batch_size: Annotated[int, typer.Option(help="Images a step.", min=1)] = 64,
    keep: Annotated[
        str, typer.Option(help="last, or best: the epoch that the label-free verdict likes best.")
    ] = "last",
    seed: Annotated[int, typer.Option(help="Of the noise and of the order.", min=0)] = 0,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Written every epoch; the same command goes on from it.", metavar="FILE")
    ] = None,
    plot: Annotated[
        bool, typer.Option("--plot", help="Draw the history beside the domain file (NAME.history.png).")
    ] = False,
    root: Root = Path(),
    force: Force = False,
) -> dict[str, Any]:
    """Adapt a network to unlabelled images and write a domain file.

    Writes NAME.safetensors and NAME.history.json, and says without labels whether it went well.

    Example: undrift adapt clinic-b/ --weights source.safetensors --out clinic-b.safetensors
    """
    import torch

    from undrift.adapt import adapt
    from undrift.file import save
    from undrift.perturb import perturb

    chosen = resolve(preset, options)
    asked = make_likelihood(likelihood, usual="shot")
    history_path, plot_path = beside(out, ".history.json"), beside(out, ".history.png") if plot else None
    weights = model.get("weights")
    claim((out, history_path, plot_path), force, (None if weights is None else Path(weights), Path(images)))
    opened = open_source(session, model)
    domain = open_images(images, root, opened.preprocess)
    try_out(opened, domain)
    held = hold_if_small(domain, opened.device)
    torch.manual_seed(seed)
    perturbed = perturb(
        opened.source.network,
        chosen,
        generator=torch.Generator().manual_seed(seed),
        preprocess=opened.preprocess,
        classes=opened.classes,
    )
    session.kept = _kept(checkpoint)
    history = adapt(
        perturbed,
        held,
        asked,
        epochs,
        batch_size=batch_size,
        keep=_keep(keep),
        checkpoint=checkpoint,
        generator=torch.Generator().manual_seed(seed),
        progress=False if session.quiet else None,
    )
    session.say(str(history))
    save(perturbed, out, source=opened.source.name)
    session.kept = f"{out} was written whole."
    wrote = [session.wrote(out)]
    history.save(history_path)
    wrote.append(session.wrote(history_path))
    if plot_path is not None:
        history.plot(plot_path)
        wrote.append(session.wrote(plot_path))
    skipped = skipped_of(domain, held)
    return {
        "domain_file": str(out),
        "wrote": wrote,
        "images": len(domain) - len(skipped),
        "skipped": skipped,
        "verdict": None if history.verdict is None else history.verdict.as_dict(),
        "kept_epoch": history.kept_epoch,
        "epochs": history.as_dict()["epochs"],
        "options": chosen.as_dict(),
    }


def _keep(text: str) -> Literal["last", "best"]:
    return text  # type: ignore[return-value]  # adapt says what is wrong with it


def _kept(checkpoint: Path | None) -> str:
    if checkpoint is None:
        return "Nothing was written. With --checkpoint FILE a run can go on where it was stopped."
    return (
        f"{checkpoint} holds what was done so far; the same command goes on from there. The domain file is not written "
        "yet."
    )
