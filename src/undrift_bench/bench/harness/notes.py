"""Notes below a table, one line each."""

from collections.abc import Iterable

from undrift import methods
from undrift_bench.bench.harness.cell import MethodRow


def row_lines(rows: Iterable[MethodRow]) -> list[str]:
    """Return the lines of rows that are not purely source-free, then the rows' own notes, each once.

    Examples:
        >>> row_lines([MethodRow("roid", "roid", note="mind it."), MethodRow("vmp-roid", "vmp-roid", note="mind it.")])
        ['roid; vmp-roid: mind it.']
    """
    rows = list(rows)
    noted: dict[str, list[str]] = {}
    for row in rows:
        if row.note:
            noted.setdefault(row.note, []).append(row.label)
    return [*not_source_free(rows), *(f"{'; '.join(labels)}: {note}" for note, labels in noted.items())]


def not_source_free(rows: Iterable[MethodRow]) -> list[str]:
    """Return a line for each row that is not purely source-free: what its method needs, by the method's attributes.

    Examples:
        >>> not_source_free([MethodRow("tent", "tent"), MethodRow("eata", "eata:cifar100")])
        ['eata: not purely source-free; it needs source samples for its Fisher term.']
    """
    found = [(row, methods.get(row.method)) for row in rows]
    return [
        f"{row.label}: not purely source-free; it needs {method.needs}."
        for row, method in found
        if not method.source_free
    ]
