"""The options --report and --tensorboard, and the HTML page of a stream while it runs."""

import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from undrift._errors import DataError, OptionError

if TYPE_CHECKING:
    from undrift.cli.session import Session
    from undrift.judge.tensorboard import TensorBoardEvents
    from undrift.loop.streaming import Stream

PageFile = Annotated[Path | None, typer.Option("--report", help="Write a page to look at.", metavar="FILE.html")]
EventsFolder = Annotated[
    Path | None, typer.Option("--tensorboard", help="Write TensorBoard events.", metavar="FOLDER", hidden=True)
]

EVERY = 60.0
"""Seconds between two versions of the page of a stream."""


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


class LivePage:
    """Writes the page of a stream once a minute; a stream goes on where it cannot be written, and says so once."""

    def __init__(self, session: "Session", going: "Stream", path: Path) -> None:
        self._session, self._going, self._path = session, going, path
        self._due = time.monotonic()  # the first batch shows whether it can be written
        self._failed = False

    def write_if_due(self) -> None:
        """Write the page if the last one is a minute old."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + EVERY
        try:
            self._going.page(self._path)
            self._failed = False
        except DataError as error:
            if not self._failed:
                self._session.warn(str(error))
            self._failed = True
