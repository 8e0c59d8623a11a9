"""Write the health file of a stream: counts, latency, whether adaptation helps, and the latest events."""

import dataclasses
import datetime
import json
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from undrift._errors import DataError
from undrift.cli.session import Session
from undrift.loop.stream_report import CHANGED, StreamReport
from undrift.loop.streaming import Stream
from undrift.system.atomic import write_text
from undrift.system.version import own_version

PERIOD = 10.0
"""Seconds between two writings at least."""

COST = 0.05
"""Part of the time that estimates may take: each is a few forward passes of a sample."""

LEAST = 64
"""Images before the first estimate."""

LAST = 20
"""Events that are named."""

QUANTILES = (0.5, 0.95, 0.99)


class Latency:
    """How long images wait for their answer, over the latest thousand batches."""

    def __init__(self) -> None:
        self._waits: deque[tuple[float, int]] = deque(maxlen=1000)

    def add(self, seconds: float, images: int) -> None:
        """Take in a batch, all of whose images waited as long."""
        self._waits.append((seconds, images))

    def quantiles(self) -> dict[float, float]:
        """Return the wait that a part of the images did not exceed, by that part; nothing before the first batch."""
        waits = sorted(self._waits)
        total, found = sum(images for _, images in waits), dict[float, float]()
        for part in QUANTILES if total else ():
            seen = 0
            for seconds, images in waits:
                seen += images
                if seen >= part * total:
                    found[part] = seconds
                    break
        return found


class Heartbeat:
    """Keeps a picture of a stream, and writes it to a file every ten seconds and at the end.

    A file that cannot be written is reported once, and is no reason to stop.

    Attributes:
        now: the picture, plain JSON values; replaced as a whole, so that another thread may read it.
    """

    def __init__(self, session: Session, path: Path | None) -> None:
        self._session, self._path = session, path
        self._began, self._started = time.monotonic(), _today()
        self._beat = self._estimated = -float("inf")
        self._spent = 0.0  # on the last estimate
        self._latency = Latency()
        self._failed = False
        self._counts: dict[str, Any] = {}
        self._happened: dict[str, int] = {}
        self._helping: dict[str, Any] | None = None
        self._events: list[dict[str, Any]] = []
        self.now: dict[str, Any] = self._picture("running")

    def answered(self, going: Stream, seconds: float, images: int, unreadable: int) -> None:
        """Take in a batch that was answered, and write where that is due."""
        self._latency.add(seconds, images)
        if time.monotonic() - self._beat >= PERIOD:
            self.look(going, unreadable)
            self._put("running")

    def look(self, going: Stream, unreadable: int, last: bool = False) -> None:
        """Look at the stream; ask whether it helps where the last time is long enough ago, or this is the last one."""
        report = going.report
        names = ("images", "batches", "steps", "skipped", "missed", "resets")
        self._counts = {name: getattr(report, name) for name in names} | {"unreadable": unreadable}
        self._happened = dict(report.counts)
        self._events = events_of(report)
        begun = time.monotonic()
        due = COST * (begun - self._estimated) >= self._spent
        if report.images >= LEAST and (due or (last and self._spent < float("inf"))):
            try:
                found = going.health
            except torch.OutOfMemoryError:
                self._session.warn("no estimate of whether adaptation helps: its sample did not fit into memory.")
                self._spent = float("inf")
                return
            self._helping = None if found is None else found.as_dict()
            self._estimated = time.monotonic()
            self._spent = self._estimated - begun

    def end(self, status: str, error: str | None = None) -> None:
        """Write for the last time, how it ended."""
        self._put(status, error)

    def _put(self, status: str, error: str | None = None) -> None:
        self._beat = time.monotonic()
        self.now = self._picture(status, error)
        if self._path is None:
            return
        try:
            write_text(self._path, json.dumps(self.now, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
        except DataError as failed:
            if not self._failed:
                self._session.warn(f"{failed} The stream goes on without it.")
            self._failed = True

    def _picture(self, status: str, error: str | None = None) -> dict[str, Any]:
        latency = {f"p{100 * part:g}": round(1e3 * wait, 3) for part, wait in self._latency.quantiles().items()}
        return {
            "undrift": own_version(),
            "status": status,
            "error": error,
            "pid": os.getpid(),
            "started": self._started,
            "updated": _today(),
            "seconds": round(time.monotonic() - self._began, 3),
            **self._counts,
            "latency_ms": latency,
            "helping": self._helping,
            "happened": self._happened,
            "events": self._events,
        }


@contextmanager
def beating(session: Session, path: Path | None) -> Iterator[Heartbeat]:
    """Give the heartbeat of a stream for a `with` block; its last beat says how the block ended."""
    heart = Heartbeat(session, path)
    try:
        yield heart
    except KeyboardInterrupt:
        heart.end("stopped")
        raise
    except BaseException as error:
        heart.end("failed", str(error) or type(error).__name__)
        raise
    heart.end("done")


def events_of(report: StreamReport) -> list[dict[str, Any]]:
    """Return what happened last in a stream, the latest at the end."""
    found: list[dict[str, Any]] = [{"kind": "no step", "batch": b, "why": why} for b, why in report.missed_at]
    found += [{"kind": "reset", "batch": batch, "why": why} for batch, why in report.resets_at]
    found.sort(key=lambda event: event["batch"])
    # Where the domain changes with every batch, its changes must not hide what the guard did.
    changes = [event for event in report.events if event.kind == CHANGED][-LAST:]
    others = [event for event in report.events if event.kind != CHANGED][-LAST:]
    rest = sorted(changes + others, key=lambda event: event.images)
    return found[-LAST:] + [dataclasses.asdict(event) for event in rest]


def _today() -> str:
    return datetime.datetime.now(tz=datetime.timezone.utc).isoformat(timespec="seconds")
