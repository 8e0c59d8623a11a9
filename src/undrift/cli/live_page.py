"""Update the HTML page of a stream while it runs."""

import time
from pathlib import Path

from undrift._errors import DataError
from undrift.cli.session import Session
from undrift.loop.streaming import Stream

EVERY = 60.0
"""Seconds between two versions of the page."""


class LivePage:
    """Writes the page of a stream once a minute; a stream goes on where it cannot be written, and says so once."""

    def __init__(self, session: Session, going: Stream, path: Path) -> None:
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
