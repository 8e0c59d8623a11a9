"""`undrift train`: train a source model from labelled images."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from undrift._errors import OptionError
from undrift.cli.flags import takes
from undrift.cli.image_arguments import Root
from undrift.cli.label_arguments import tree
from undrift.cli.model_arguments import ModelFlags, given_preprocess
from undrift.cli.output_paths import Force, alone, beside, claim
from undrift.cli.session import Session, command
from undrift_bench.extension import DATA_SETS, data_set
from undrift_bench.train import TrainOptions, train_preset

USUAL = {"digits": "digits", "cifar10": "cifar", "cifar100": "cifar"}


@command
@takes(TrainOptions, "options", "The training")
def run(
    session: Session,
    images: Annotated[
        str, typer.Argument(help=f"A folder or .tar with one folder a class, or a data set: {DATA_SETS}.")
    ],
    out: Annotated[Path, typer.Option(help="The source model to write: NAME.safetensors.", metavar="FILE")],
    options: dict[str, Any],
    preset: Annotated[
        str | None, typer.Option(help="cifar, digits or shot. Default: the one that fits the data set.")
    ] = None,
    trunk: Annotated[
        Path | None, typer.Option(help="Weights to start from, such as ImageNet's ResNet-50.", metavar="FILE")
    ] = None,
    resize: Annotated[
        str | None,
        typer.Option(help="Length of the shorter side, HEIGHTxWIDTH, or none. Default: the network's.", metavar="SIZE"),
    ] = None,
    crop: Annotated[
        str | None,
        typer.Option(help="Side of the crop, random in training, or none. Default: the network's.", metavar="SIZE"),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    resume: Annotated[bool, typer.Option(help="Go on from the checkpoint beside the output, if there is one.")] = True,
    root: Root = Path(),
    force: Force = False,
) -> dict[str, Any]:
    """Train a source model.

    Writes NAME.safetensors (with class names and preprocessing inside) and NAME.png, the curve. Killed, the same
    command goes on from NAME.checkpoint.pt.

    Example: undrift train digits:mnist --out mnist.safetensors
    """
    from undrift_bench import zoo
    from undrift_bench.train import train_source

    chosen = train_preset(preset or USUAL.get(images.partition(":")[0], "shot")).replace(**options)
    if chosen.network not in zoo.names():
        raise OptionError(f"there is no network {chosen.network!r}; the zoo has {', '.join(zoo.names())}. Choose one.")
    preprocess = given_preprocess(ModelFlags(resize=resize, crop=crop), zoo.preprocess(chosen.network))
    checkpoint = beside(out, ".checkpoint.pt")
    with alone(out):  # before a checkpoint is looked for: another may be about to write it, or to remove it
        going_on = resume and checkpoint.exists()
        claim((out, beside(out, ".png")), force or going_on, (trunk, Path(images)))
        named = None if Path(images).exists() else data_set(images, root, train=True)
        domain = tree(images, preprocess) if named is None else named.prepared(preprocess)
        try:
            trained = train_source(
                domain,
                out,
                chosen,
                trunk=trunk,
                device=device,
                resume=resume,
                overwrite=force,
                progress=not session.quiet,
            )
        except KeyboardInterrupt:
            if checkpoint.exists():
                session.kept = f"{checkpoint} holds a state of the run; the same command goes on from there."
            raise
    session.kept = f"{out} was written whole."
    accuracy = "no validation" if trained.accuracy is None else f"{trained.accuracy:.2%} on validation images"
    session.say(f"{chosen.network} on {domain.name}: {accuracy}, epoch {trained.epoch}, {trained.seconds:.0f} s")
    wrote = [session.wrote(trained.path)] + ([session.wrote(trained.curve)] if trained.curve else [])
    return {
        "wrote": wrote,
        "accuracy": trained.accuracy,
        "epoch": trained.epoch,
        "seconds": trained.seconds,
        "history": [dataclasses.asdict(row) for row in trained.history],
        "options": chosen.as_dict(),
    }
