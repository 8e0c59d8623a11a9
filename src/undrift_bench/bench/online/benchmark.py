"""The base of the three online benchmarks: methods on streams of corrupted images."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from undrift.images import TensorDomain
from undrift.images.corrupt import CORRUPTIONS
from undrift_bench.bench.harness.cell import Cell, MethodRow, chosen, seeds_of
from undrift_bench.bench.harness.networks import SourceNetwork, tiny_data, tiny_network
from undrift_bench.bench.harness.request import Request
from undrift_bench.bench.harness.run import RunCell
from undrift_bench.bench.harness.store import Store
from undrift_bench.bench.online import report
from undrift_bench.bench.online.rows import ablation_rows, online_rows
from undrift_bench.bench.online.settings import CONTINUAL, StreamSetting
from undrift_bench.bench.online.streaming import Streaming

TINY_CORRUPTIONS = ("gaussian_noise", "contrast")
TINY_IMAGES, TINY_BATCH = 12, 6


@dataclass(frozen=True)
class OnlineBenchmark:
    """One online benchmark; satisfies `undrift_bench.bench.Benchmark`.

    Attributes:
        name: as on the command line.
        title: what its table is called.
        data: "cifar10", "cifar100" or "imagenet": which authors' values hold.
        networks: the source networks.
        clean: reads the clean test images.
        images: of each domain.
        batch: images of each batch.
        settings: the first one is the main one.
        note: what a reader of the table has to know.
    """

    name: str
    title: str
    data: str
    networks: tuple[SourceNetwork, ...]
    clean: Callable[[Request], TensorDomain]
    images: int
    batch: int
    settings: tuple[StreamSetting, ...] = (CONTINUAL,)
    note: str = ""
    corruptions: tuple[str, ...] = CORRUPTIONS

    def scaled(self, request: Request) -> "OnlineBenchmark":
        """Return the benchmark itself, or its tiny stand-in on random images."""
        if not request.tiny:
            return self

        def least(size: int | None) -> int | None:
            return size and min(size, TINY_BATCH)

        shrunk = tuple(replace(s, batch=least(s.batch), gather=least(s.gather)) for s in self.settings)
        return replace(
            self,
            networks=(tiny_network(),),
            clean=tiny_data,
            images=TINY_IMAGES,
            batch=TINY_BATCH,
            corruptions=TINY_CORRUPTIONS,
            settings=shrunk,
        )

    @cached_property
    def rows(self) -> list[MethodRow]:
        """The lines of the table."""
        return online_rows(self.data)

    @cached_property
    def ablation(self) -> list[MethodRow]:
        """The rows of `--only ablation`, which are on a page of their own."""
        return ablation_rows(self.data)

    def cells(self, request: Request) -> list[Cell]:
        """Return the cells asked for."""
        here = self.scaled(request)
        names = tuple(s.name for s in here.settings)
        settings = request.wanted(names, request.settings or names[:1], "setting")
        known = tuple(n.name for n in self.networks)
        networks = request.wanted(known, request.networks or known, "network")
        if request.tiny:  # one stand-in stands for whichever was named
            networks = tuple(n.name for n in here.networks)
        rows = chosen([*here.rows, *here.ablation], request.only, request.tier)
        return here._cells(request, networks, settings, rows)

    def shown(self, request: Request) -> list[Cell]:
        """Return every cell of the given size that there can be."""
        here = self.scaled(request)
        networks, settings = tuple(n.name for n in here.networks), tuple(s.name for s in here.settings)
        return here._cells(request, networks, settings, [*here.rows, *here.ablation])

    def _cells(
        self, request: Request, networks: tuple[str, ...], settings: tuple[str, ...], rows: list[MethodRow]
    ) -> list[Cell]:
        return [
            Cell(self.name, network, setting.name, row, seed, self.count(setting, request), request.precision)
            for setting in self.settings
            if setting.name in settings
            for network in networks
            for row in rows
            for seed in seeds_of(row, request.seeds)
        ]

    def count(self, setting: StreamSetting, request: Request) -> int:
        """Return how many images of each domain a setting has here."""
        return min(n for n in (self.images, setting.images, request.images) if n is not None)

    def prepare(self, request: Request) -> RunCell:
        """Return what runs one cell."""
        return Streaming(self.scaled(request), request)

    def markdown(self, store: Store, request: Request) -> str:
        """Return the tables."""
        return report.markdown(self.scaled(request), store, request)

    def figures(self, store: Store, request: Request) -> dict[str, Callable[[Path], int]]:
        """Return what draws the figures."""
        return report.figures(self.scaled(request), store, request)
