"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from undrift.cli.method_arguments import METHOD_PANEL

Images = Annotated[str, typer.Argument(help="Folder, .tar, .txt, .npy or data set.", show_default=False)]
DomainFile = Annotated[Path | None, typer.Option(help="What `undrift adapt` wrote.", metavar="FILE")]
Preset = Annotated[
    str | None,
    typer.Option(
        help="VMP's options, instead of a method: paper or released.",
        metavar="NAME",
        hidden=True,
        rich_help_panel=METHOD_PANEL,
    ),
]
Samples = Annotated[int | None, typer.Option(help="Draws per answer; 0: the mean network.", min=0, metavar="N")]
ModeName = Annotated[
    str,
    typer.Option(
        help="full: all draws. fast: two or three, and a temperature for the rest.",
        metavar="NAME",
        hidden=True,
    ),
]
Temperature = Annotated[
    str, typer.Option(help="Divides the logits. auto: chosen without labels.", metavar="T|auto", hidden=True)
]
Seed = Annotated[
    int, typer.Option(help="Seed of the noise and of the order of images.", min=0, metavar="N", hidden=True)
]
BatchSize = Annotated[int, typer.Option(help="Images per batch.", min=1, metavar="N")]
MethodBatchSize = Annotated[
    int | None, typer.Option(help="Batch size; default 64 or the method's.", min=1, metavar="N")
]
PackMean = Annotated[
    str | None,
    typer.Option(help="How the file holds trained weights: 1-bit, 1.5-bit, …, exact.", metavar="NAME", hidden=True),
]
