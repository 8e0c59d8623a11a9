"""The data sets of the offline tables: tasks in the paper's order, and published numbers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import permutations

from undrift._errors import OptionError
from undrift.images import FileDomain
from undrift.options import _suggest
from undrift_bench import data
from undrift_bench.bench.harness import published as numbers
from undrift_bench.bench.harness.published import Published
from undrift_bench.bench.harness.request import Request
from undrift_bench.data.office_31 import OFFICE_31
from undrift_bench.data.officehome import OFFICE_HOME
from undrift_bench.data.pacs_domains import PACS


@dataclass(frozen=True)
class Task:
    """A source domain and a target domain.

    Attributes:
        name: as in `--settings` and in the files of cells.
        title: what tables call it.
        main: whether it is of the first tier: every seed, before the others.
    """

    name: str
    title: str
    source: str
    target: str
    main: bool = True


@dataclass(frozen=True)
class DataSet:
    """One data set of several domains.

    Attributes:
        name: as in `--set dataset=…`.
        title: what tables call it.
        folder: where its domains lie below the data folder; the data folder itself will do, too.
        load: reads a domain of a folder.
        images: how many each domain has.
        tasks: in the order of the tables.
        source_epochs: of source training.
        published: accuracies by method, tasks in the same order; empty where the paper has none.
        note: what a reader of the table has to know.
    """

    name: str
    title: str
    folder: str
    load: Callable[..., FileDomain]
    images: Mapping[str, int]
    tasks: tuple[Task, ...]
    source_epochs: int
    published: Mapping[str, Published] = field(default_factory=dict)
    generalized: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    note: str = ""

    def task(self, name: str) -> Task:
        """Return a task by its name."""
        return next(task for task in self.tasks if task.name == name)

    def shrunk(self) -> "DataSet":
        """Return the first task and its way back, for trying things out."""
        first = self.task("photo-sketch") if self.name == "pacs" else self.tasks[0]
        pair = (first.source, first.target)
        tasks = tuple(t for t in self.tasks if (t.source, t.target) in (pair, pair[::-1]))
        return replace(self, tasks=tasks)


def _counts(images: Mapping[str, tuple[tuple[str, ...], int]]) -> dict[str, int]:
    return {domain: count for domain, (_, count) in images.items()}


def _pacs_tasks() -> tuple[Task, ...]:
    # Tier A: away from photographs and back to colour from sketches, the easiest and the hardest of PACS.
    order = ("photo", "sketch", "art_painting", "cartoon")
    return tuple(
        Task(f"{a}-{b}", f"{a} → {b}".replace("_", " "), a, b, main=a in ("photo", "sketch"))
        for a, b in permutations(order, 2)
    )


def _office_tasks(titles: tuple[str, ...], domains: Mapping[str, str]) -> tuple[Task, ...]:
    pairs = [(title, *title.split("→")) for title in titles]
    return tuple(Task(f"{a}-{b}", title, domains[a], domains[b]) for title, a, b in pairs)


SETS = {
    "pacs": DataSet(
        "pacs",
        "PACS",
        "pacs",
        data.pacs,
        _counts(PACS.domains),
        _pacs_tasks(),
        source_epochs=20,
        note="PACS is not in the paper: it stands in for Office-31 and Office-Home, so nothing is published beside it.",
    ),
    "office31": DataSet(
        "office31",
        "Office-31",
        "office31",
        data.office31,
        _counts(OFFICE_31.domains),
        _office_tasks(numbers.OFFICE31_TASKS, {"A": "amazon", "D": "dslr", "W": "webcam"}),
        source_epochs=100,
        published=numbers.OFFICE31,
    ),
    "office-home": DataSet(
        "office-home",
        "Office-Home",
        "office-home",
        data.office_home,
        _counts(OFFICE_HOME.domains),
        _office_tasks(numbers.OFFICE_HOME_TASKS, {"Ar": "art", "Cl": "clipart", "Pr": "product", "Rw": "real_world"}),
        source_epochs=50,
        published=numbers.OFFICE_HOME,
        generalized=numbers.GENERALIZED_OFFICE_HOME,
    ),
}


def asked(request: Request) -> DataSet:
    """Return the data set that was asked for with `--set dataset=NAME`; PACS where none was."""
    name = request.extra.get("dataset", "pacs")
    if name not in SETS:
        raise OptionError(
            f"there is no offline data set {name!r}{_suggest(name, SETS)}; needed: {', '.join(SETS)}. Choose one."
        )
    return SETS[name].shrunk() if request.tiny else SETS[name]


def paper_row(row: str) -> str:
    """Return what the paper's tables call the method of a row: "source", "shot", "vmp", or the name itself.

    Examples:
        >>> paper_row("vmp-shot:released"), paper_row("source")
        ('vmp', 'source')
    """
    return "vmp" if row.partition(":")[0] == "vmp-shot" else row
