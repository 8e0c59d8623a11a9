"""A user's request to a benchmark: which cells, which files, which device, how long."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from undrift._errors import DataError, OptionError
from undrift.options import _suggest

TIERS = ("A", "B")
STREAMS = ("online-c10", "online-c100", "online-imagenet")
DOMAINS = ("offline", "generalized")
CELLS = (*STREAMS, *DOMAINS, "analysis")

EXTRA: dict[str, tuple[str, ...]] = {
    "dataset": DOMAINS,
    "task": ("analysis",),
    "epochs": ("analysis",),
    "head": STREAMS,
    "posterior": STREAMS,
    "shared": CELLS,
    "packs": DOMAINS,
}
"""The values of `--set` by name, and the benchmarks that read each; a new benchmark adds its own here."""

OPTIONS: dict[str, tuple[str, ...]] = {
    "--only": (*CELLS, "speed"),
    "--tier": CELLS,
    "--seeds": (*STREAMS, *DOMAINS),
    "--networks": STREAMS,
    "--settings": CELLS,
    "--images": CELLS,
    "--deadline": CELLS,
    "--fast": CELLS,
    "--tiny": (*CELLS, "speed", "table1"),
    "--weights": CELLS,
    "--wrn2810": CELLS,
    "--resnet50": CELLS,
}
"""The options that choose what is run, and the benchmarks that read each.

`--data`, `--cache`, `--frost`, `--device` and, among those with cells, `--wrn2810` and `--resnet50` say what a machine
has: one line of them serves every benchmark, and none refuses what it has no use for.
"""

WEIGHTS: dict[str, tuple[str, ...]] = {
    "wrn28_10": ("online-c10",),
    "wrn40_2": ("online-c10", "analysis"),
    "resnext29": ("online-c100", "analysis"),
    "resnet50_v1": ("online-imagenet", *DOMAINS, "analysis"),
    "resnet50": (*DOMAINS, "analysis"),
    "shot_resnet50": (*DOMAINS, "analysis"),
}
"""The networks that `--weights` may name a file of, and the benchmarks that read each."""

VIEWS = ("task", "epochs")  # the values of `--set` that lead to other cells, none of which the whole benchmark has


@dataclass(frozen=True)
class Request:
    """One call of `undrift bench NAME`; every benchmark takes the same.

    Attributes:
        data: the folder of the data sets.
        results: the folder for cells, tables and figures.
        cache: a folder for corrupted images, so that they are made once; None makes them again.
        only: rows, by their or their method's names; empty is all.
        tier: "A", "B" or None, both.
        seeds: how many, from 0 up.
        networks: by name; empty is all.
        settings: by name; empty is the benchmark's main one, "all" is all.
        images: at most so many of each domain.
        tiny: a tiny random network and a few random images, to see that everything runs.
        deadline: seconds; no cell is started that would probably end later.
        device: "auto", "cpu", "cuda", …
        fast: channels-last and bfloat16.
        weights: source networks' files by the network's name.
        frost: a folder of frost pictures, where the package that holds them is not installed.
        extra: values that only some benchmarks read, by the names of `EXTRA`. "head" and "posterior" are files that TTT
            and BACS need from source training; with "shared", on a machine with other work, no times are recorded.
    """

    data: Path = Path()
    results: Path = Path("benchmarks/results")
    cache: Path | None = None
    only: tuple[str, ...] = ()
    tier: Literal["A", "B"] | None = None
    seeds: int = 3
    networks: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    images: int | None = None
    tiny: bool = False
    deadline: float | None = None
    device: str = "auto"
    fast: bool = False
    weights: Mapping[str, Path] = field(default_factory=dict)
    frost: Path | None = None
    extra: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.tier not in (None, *TIERS):
            raise OptionError(f"tier {self.tier!r} does not exist; needed: A or B. Leave it out for both.")
        if self.seeds < 1 or (self.images is not None and self.images < 2):
            raise OptionError(
                f"seeds={self.seeds} and images={self.images}; needed: at least one seed and two images. Raise them."
            )
        for name, value in self.extra.items():
            if name not in EXTRA:
                known = ", ".join(f"{known} ({', '.join(readers)})" for known, readers in EXTRA.items())
                raise OptionError(
                    f"--set {name}={value}: no benchmark reads {name!r}{_suggest(name, EXTRA)}; needed: one of {known}."
                    " Choose among these."
                )

    @property
    def precision(self) -> Literal["bf16", "float32"]:
        """What cells are computed in."""
        return "bf16" if self.fast else "float32"

    @property
    def view(self) -> str:
        """What the names of tables end with where these are of other cells than the whole benchmark's; else nothing."""
        parts = [] if self.images is None else [f"n{self.images}"]
        parts += [f"{name}-{self.extra[name]}" for name in VIEWS if name in self.extra]
        return "".join(f"-{part}" for part in parts)

    @property
    def place(self) -> torch.device:
        """The device that cells run on."""
        name = ("cuda" if torch.cuda.is_available() else "cpu") if self.device == "auto" else self.device
        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise OptionError(f"there is no device {name!r}; needed: auto, cpu or cuda. Choose one.") from error
        if device.type == "cuda" and not torch.cuda.is_available():
            raise DataError("cuda was asked for and there is no GPU; needed: one. Choose --device cpu.")
        return device

    def check_read_by(self, benchmark: str) -> None:
        """Refuse a value of `--set` that a benchmark would ignore."""
        for name, value in self.extra.items():
            _refuse_unread(benchmark, EXTRA, name, f"--set {name}={value}")

    def wanted(self, known: tuple[str, ...], asked: tuple[str, ...], what: str) -> tuple[str, ...]:
        """Return the names asked for, in the benchmark's order; raises where one is unknown."""
        for name in asked:
            if name not in (*known, "all"):
                raise OptionError(
                    f"there is no {what} {name!r} here; needed: {', '.join(known)}, or all. Choose these."
                )
        return known if "all" in asked else tuple(name for name in known if name in asked)


def check_options(benchmark: str, options: Iterable[str], networks: Iterable[str] = ()) -> None:
    """Refuse an option, or a network of `--weights`, that a benchmark would ignore."""
    for name in options:
        _refuse_unread(benchmark, OPTIONS, name, name)
    for name in networks:
        _refuse_unread(benchmark, WEIGHTS, name, f"--weights {name}")


def _refuse_unread(benchmark: str, table: Mapping[str, tuple[str, ...]], name: str, given: str) -> None:
    """Raise where a table says that a benchmark does not read what was given."""
    readers = table.get(name, ())
    if benchmark in readers:
        return
    by = f"{', '.join(readers)}, and not by {benchmark}" if readers else f"no benchmark{_suggest(name, table)}"
    known = ", ".join(other for other, theirs in table.items() if benchmark in theirs)
    needed = f"one of {known}" if known else "none, as it has nothing to choose"
    raise OptionError(f"{given} is read by {by}; needed: {needed}. Leave it out.")


class CannotRun(DataError):
    """A cell that lacks a file: it stays "not run", which is no failure of its method."""


class TooLate(CannotRun):
    """A cell that lacks no file, but the time to train its source network before the deadline."""
