"""Store finished cells, one JSON file each: they accumulate, survive a kill, and merge by copying."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from undrift._errors import DataError
from undrift.system.atomic import write_text
from undrift.system.lock import held
from undrift_bench.bench.harness.cell import Cell

Record = dict[str, Any]
"""What is known of one cell; a cell that failed has `failed`, the message, and no numbers."""


class Store:
    """A folder of records, `FOLDER/KEY.json`.

    Examples:
        >>> import tempfile
        >>> from undrift_bench.bench.harness.cell import MethodRow
        >>> cell = Cell("demo", "digits", "continual", MethodRow("tent", "tent"), 0, 100)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     store = Store(Path(folder) / "demo")
        ...     store.put(cell, {"error": 0.25})
        ...     store.finished(cell)["error"], store.finished(cell)["row"]
        (0.25, 'tent')
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: dict[str, Record] = {}  # a record is written once, so it can be cached

    def put(self, cell: Cell, numbers: Mapping[str, Any]) -> None:
        """Write what a cell gave, whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        record = cell.identity | dict(numbers)
        write_text(self._place(cell), json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
        self._read.pop(cell.key, None)

    @contextmanager
    def claim(self, cell: Cell) -> Iterator[bool]:
        """Hold a cell for the length of a `with` block; False where another process holds it, or finished it meanwhile.

        So several processes share a benchmark. The cell of a process that dies is free again.
        """
        with _held(self.folder / f".{cell.key}.lock") as mine:
            self._read.pop(cell.key, None)  # a failed cell may have been run again
            yield mine and self.finished(cell) is None

    def get(self, cell: Cell) -> Record | None:
        """Return the record of a cell, failed or finished, or None; one made with other settings is not its own."""
        record = self._file(cell)
        if record is None:
            return None
        wanted = json.loads(json.dumps(cell.identity))
        return record if all(record.get(name) == value for name, value in wanted.items()) else None

    def finished(self, cell: Cell) -> Record | None:
        """Return the record of a cell that ran to its end, or None."""
        record = self.get(cell)
        return None if record is None or "failed" in record else record

    def state(self, cell: Cell) -> str:
        """Return "finished", "failed", "stale" (finished, and the method changed since) or "not run"."""
        record, file = self.get(cell), self._file(cell)
        if record is not None:
            return "failed" if "failed" in record else "finished"
        return "not run" if file is None or "failed" in file else "stale"

    def shown(self, cell: Cell) -> Record | None:
        """Return what tables show of a cell: its finished record, or a stale one that carries a `note`.

        Such a note says what of the record still holds; the numbers it names in `withheld` are left out.
        """
        record = self.finished(cell)
        if record is None and self.state(cell) == "stale":
            record = self._file(cell)
            record = record if record is not None and "note" in record else None
        withheld = () if record is None else record.get("withheld", ())
        return record if not withheld or record is None else {n: v for n, v in record.items() if n not in withheld}

    def all(self, cells: Iterable[Cell]) -> list[Record]:
        """Return what tables show of these cells, in order."""
        return [record for cell in cells if (record := self.shown(cell)) is not None]

    def _file(self, cell: Cell) -> Record | None:
        """Return the content of the cell's file, even if made with other settings."""
        if cell.key not in self._read:
            place = self._place(cell)
            if not place.is_file():
                return None
            self._read[cell.key] = _load(place)
        return self._read[cell.key]

    def _place(self, cell: Cell) -> Path:
        return self.folder / f"{cell.key}.json"


@contextmanager
def _held(place: Path) -> Iterator[bool]:
    """Hold a lock for the length of a `with` block; False where another process has it."""
    with ExitStack() as stack:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            mine = stack.enter_context(held(place))
        except OSError as error:
            raise DataError(
                f"{place} cannot be written ({error.strerror}); needed: a folder of results that this process may "
                "write to. Name another with --results, or delete the file where a run of somebody else has left it."
            ) from error
        yield mine


def _load(place: Path) -> Record:
    try:
        record = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{place} cannot be read ({error}); needed: the JSON record of a finished cell. Copy it again, or delete "
            "it and the cell is run again."
        ) from error
    if not isinstance(record, dict):
        raise DataError(f"{place} holds a {type(record).__name__}; needed: the JSON record of a cell. Delete it.")
    return record
