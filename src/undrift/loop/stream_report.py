"""Count what happened in a stream, and where."""

from collections import deque
from dataclasses import asdict, astuple, dataclass, field, fields
from typing import Any, Literal

REMEMBERED = 1000  # places that are named; a stream may run for months, and everything is counted


def _latest() -> "deque[Any]":
    return deque(maxlen=REMEMBERED)


EventKind = Literal[
    "domain changed", "gather on", "balanced on", "balanced off", "went back", "source answers", "learning again"
]
CHANGED: EventKind = "domain changed"


@dataclass(frozen=True)
class StreamEvent:
    """Something that a stream noticed, or decided by itself.

    Attributes:
        images: how many images had come before.
        kind: what happened.
        why: what was seen, in words.
    """

    images: int
    kind: EventKind
    why: str

    def __str__(self) -> str:
        return f"{self.kind} at image {self.images:,}: {self.why}"


@dataclass
class StreamReport:
    """What has happened in a stream so far. Places count from 0 over the whole stream; the latest 1,000 are named.

    Attributes:
        batches: batches answered.
        images: images answered, the skipped ones among them.
        steps: optimiser steps taken.
        skipped: images with NaN or infinite values; they took no part in adaptation.
        skipped_at: places of those images.
        missed: batches whose step was not made.
        missed_at: places of these batches, with reasons.
        resets: how often the stream's start state was put back because the present one was no longer sound.
        resets_at: places of these batches, with reasons.
        counts: how often each kind of event happened.
    """

    batches: int = 0
    images: int = 0
    steps: int = 0
    skipped: int = 0
    skipped_at: "deque[int]" = field(default_factory=_latest)
    missed: int = 0
    missed_at: "deque[tuple[int, str]]" = field(default_factory=_latest)
    resets: int = 0
    resets_at: "deque[tuple[int, str]]" = field(default_factory=_latest)
    counts: dict[str, int] = field(default_factory=dict)
    _events: "deque[StreamEvent]" = field(default_factory=_latest)

    @property
    def events(self) -> tuple[StreamEvent, ...]:
        """What the stream noticed and decided by itself, the latest 1,000; a change of domain is forgotten first."""
        return tuple(self._events)

    def event(self, kind: EventKind, why: str) -> None:
        """Note what happened in the current batch."""
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if len(self._events) == REMEMBERED:  # domains may change a thousand times since the guard acted
            oldest = next((place for place, event in enumerate(self._events) if event.kind == CHANGED), 0)
            del self._events[oldest]
        self._events.append(StreamEvent(self.images, kind, why))

    def miss(self, why: str) -> None:
        """Count the current batch as one without a step."""
        self.missed += 1
        self.missed_at.append((self.batches, why))

    def reset(self, why: str) -> None:
        """Count a reset in the current batch."""
        self.resets += 1
        self.resets_at.append((self.batches, why))

    def __str__(self) -> str:
        text = f"{_many(self.images, 'image')} in {_many(self.batches, 'batch')}, {_many(self.steps, 'step')}"
        if self.skipped:
            text += f"; {_many(self.skipped, 'image')} skipped, NaN or infinite: {_named(self.skipped_at)}"
        if self.missed:
            text += f"; {_many(self.missed, 'batch')} without a step: {_named(self.missed_at)}"
        if self.resets:
            text += f"; {_many(self.resets, 'reset')}, at batch {_named(self.resets_at)}"
        last = {event.kind: event.images for event in self._events}
        for kind, count in self.counts.items():
            often = "once, at" if count == 1 else f"{count:,} times, last at"
            text += f"; {kind} {often} image {last[kind]:,}" if kind in last else f"; {kind} {count:,} times"
        return text

    __repr__ = __str__  # what a notebook shows

    def state_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        plain = {k: list(v) if isinstance(v, deque) else v for k, v in asdict(self).items() if k != "_events"}
        return plain | {"events": [astuple(event) for event in self._events]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved report."""
        for f in fields(self):
            old = getattr(self, f.name)
            value = state[f.name.lstrip("_")]
            if f.name == "_events":
                value = deque((StreamEvent(*event) for event in value), maxlen=REMEMBERED)
            elif isinstance(old, dict):
                value = dict(value)
            elif isinstance(old, deque):
                value = deque((tuple(v) if isinstance(v, list) else v for v in value), maxlen=REMEMBERED)
            setattr(self, f.name, value)


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith('ch') else 's'}"


def _named(places: "deque[Any]", most: int = 5) -> str:
    names = [f"{p[0]} ({p[1]})" if isinstance(p, tuple) else str(p) for p in list(places)[-most:]]
    return ("… " if len(places) > most else "") + ", ".join(names)
