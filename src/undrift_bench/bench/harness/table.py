"""Make Markdown tables of records: mean and deviation over seeds, or "not run"."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from undrift_bench.bench.harness.store import Record

NOT_RUN = "not run"
FAILED = "failed"
NOT_MEASURED = "not measured"  # run, but without this number
DAGGER = "†"  # behind the name of a row whose record carries a note, or has numbers withdrawn


@dataclass(frozen=True)
class Column:
    """One column: its title, where its number lies in a record, and how it is written.

    Attributes:
        take: from a record to a number, or None where there is none.
        show: from the numbers of all seeds to text.
        optional: whether a table leaves the column out where no record has its number, as older records lack it.
    """

    title: str
    take: Callable[[Record], float | None]
    show: Callable[[Sequence[float]], str]
    optional: bool = False

    def text(self, records: Sequence[Record]) -> str:
        """Return the cell of the table for the records of one row."""
        numbers = [n for record in records if (n := self.take(record)) is not None]
        return self.show(numbers) if numbers else "–"


def in_use(columns: Sequence[Column], records: Sequence[Record]) -> list[Column]:
    """Return the columns of a table of these records: an optional one only if a record has its number.

    Examples:
        >>> [column.title for column in in_use([field("error", "error"), AURC], [{"error": 0.2}])]
        ['error']
    """
    return [c for c in columns if not c.optional or any(c.take(record) is not None for record in records)]


def field(title: str, name: str, scale: float = 1.0, digits: int = 2, optional: bool = False) -> Column:
    """Return a column of one number of the record, with its deviation over seeds.

    Examples:
        >>> field("error %", "error", 100).text([{"error": 0.25}, {"error": 0.27}])
        '26.00 ± 1.41'
    """
    return Column(title, lambda record: record.get(name), lambda n: spread(n, scale, digits), optional)


def median(title: str, name: str, digits: int = 1) -> Column:
    """Return a column of one number whose seeds are repetitions: their median."""
    return Column(title, lambda record: record.get(name), lambda n: f"{statistics.median(n):,.{digits}f}")


def spread(numbers: Sequence[float], scale: float = 1.0, digits: int = 2) -> str:
    """Return mean ± standard deviation (of a sample), the mean alone for one number."""
    mean = f"{scale * statistics.fmean(numbers):.{digits}f}"
    return mean if len(numbers) < 2 else f"{mean} ± {scale * statistics.stdev(numbers):.{digits}f}"


def size(numbers: Sequence[float]) -> str:
    """Return bytes as kB or MB."""
    count = statistics.median(numbers)
    return f"{count / 1e6:,.1f} MB" if count >= 1e6 else f"{count / 1e3:,.1f} kB"


AURC = field("AURC × 100", "aurc", 100, optional=True)
AUGRC = field("AUGRC × 100", "augrc", 100, optional=True)


def marked(name: str, records: Sequence[Record]) -> str:
    """Return a row's name, with a dagger where a record of it carries a note or has withdrawn numbers.

    Examples:
        >>> marked("roid", [{"note": "error only"}]), marked("tent", [{}])
        ('roid †', 'tent')
    """
    return f"{name} {DAGGER}" if any(_told(record) for record in records) else name


def footnotes(records: Mapping[str, Sequence[Record]]) -> list[str]:
    """Return the lines under a table: notes, withdrawn numbers, warnings, and rows that another machine made.

    Args:
        records: of each row, by the name that the table calls it.
    """
    noted: dict[str, list[str]] = {}
    warned: dict[str, list[str]] = {}
    for name, found in records.items():
        for text in dict.fromkeys(text for record in found for text in _told(record)):
            noted.setdefault(text, []).append(name)
        for text in dict.fromkeys(message for record in found for message in record.get("warnings", ())):
            warned.setdefault(text, []).append(name)
    lines = [f"- {DAGGER} {', '.join(names)}: {text}" for text, names in noted.items()]
    lines += [f"- {', '.join(names)} warned: {' '.join(text.split())}" for text, names in warned.items()]
    return lines + _of_another_machine(records)


def _of_another_machine(records: Mapping[str, Sequence[Record]]) -> list[str]:
    """Return a line for each machine but the one that made most rows."""
    made: dict[str, list[str]] = {}
    for name, found in records.items():
        for machine in dict.fromkeys(record["hardware"] for record in found if "hardware" in record):
            made.setdefault(machine, []).append(name)
    usual = max(made, key=lambda machine: len(made[machine]), default=None)
    return [f"- {', '.join(names)}: run on {machine}." for machine, names in made.items() if machine != usual]


def _told(record: Record) -> list[str]:
    """Return what a reader of a record has to know: what of it holds, and why numbers of it are None."""
    withdrawn = [f"withdrawn: {record['withdrawn']}"] if "withdrawn" in record else []
    return [record["note"], *withdrawn] if "note" in record else withdrawn


def several_sources(records: Mapping[str, Sequence[Record]], a_seed: bool = True) -> list[str]:
    """Return a line for each setting whose rows are not of one source network: trained again, it is another.

    Args:
        records: of each row, by the name that the table calls it.
        a_seed: whether each seed has a source network of its own.
    """
    places: dict[str, dict[str, dict[str, None]]] = {}
    for name, found in records.items():
        for record in found:
            if "source_network" in record:
                place = record["setting"] + f", seed {record['seed']}" * a_seed
                places.setdefault(place, {}).setdefault(record["source_network"], {})[name] = None
    return [
        f"- {place}: not all of one source network: "
        + "; ".join(f"{', '.join(names)} ({network})" for network, names in there.items())
        for place, there in places.items()
        if len(there) > 1
    ]


def markdown(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table: first column left, the others right."""
    rule = "|".join(["---", *("---:" for _ in header[1:])])
    lines = [_line(header), f"|{rule}|", *(_line(row) for row in rows)]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[Any]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"
