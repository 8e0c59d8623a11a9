"""Options for the HTML page of a run, and for TensorBoard events."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from undrift._errors import OptionError

if TYPE_CHECKING:
    from undrift.judge.tensorboard import TensorBoardEvents

PageFile = Annotated[Path | None, typer.Option("--report", help="Write a page to look at.", metavar="FILE.html")]
EventsFolder = Annotated[
    Path | None, typer.Option("--tensorboard", help="Write TensorBoard events.", metavar="FOLDER", hidden=True)
]


def check_page(path: Path | None) -> None:
    """Raise unless the file's name is that of a page."""
    if path is not None and path.suffix.lower() not in (".html", ".htm"):
        raise OptionError(f"--report {path} does not end in .html; needed: the name of a page. Rename it.")


def events_in(folder: Path | None) -> "AbstractContextManager[TensorBoardEvents | None]":
    """Return what writes events, or a `with` block of None; raise at once where TensorBoard is missing."""
    if folder is None:
        return nullcontext()
    from undrift.judge.tensorboard import TensorBoardEvents

    return TensorBoardEvents(folder)
