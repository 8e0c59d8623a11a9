"""Turn predictions into rows, and write rows as CSV or Parquet."""

import csv
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from undrift._errors import OptionError, UndriftError
from undrift.cli.class_names import class_name
from undrift.system.atomic import writing

if TYPE_CHECKING:
    from undrift.answer.prediction import Prediction

COLUMNS = ("path", "label", "probability", "entropy", "mutual_information")
ABSTAIN = "abstain"
Row = tuple[str, str, float, float, float]


class Table(Protocol):
    """A table that takes rows."""

    def add(self, rows: Sequence[Row]) -> None:
        """Add some rows."""
        ...


def rows_of(
    names: Sequence[str], prediction: "Prediction", classes: tuple[str, ...] | None, abstain_below: float | None
) -> list[Row]:
    """Return one row per image; the label is "abstain" below the threshold and empty without a finite answer."""
    found = prediction.cpu()
    numbers = (found.label.tolist(), found.probs.amax(1).tolist(), found.entropy.tolist(), found.mutual_info.tolist())
    rows = []
    for name, label, probability, entropy, mutual in zip(names, *numbers, strict=True):
        unsure = label >= 0 and abstain_below is not None and probability < abstain_below
        rows.append((name, ABSTAIN if unsure else class_name(classes, label), probability, entropy, mutual))
    return rows


def check_threshold(abstain_below: float | None, classes: tuple[str, ...] | None) -> None:
    """Raise if the threshold is not a probability, or a class has the name of an abstention."""
    if abstain_below is None:
        return
    if not 0 <= abstain_below <= 1:
        raise OptionError(
            f"--abstain-below {abstain_below} is no probability; needed: a number from 0 to 1, such as 0.7. Change it."
        )
    if classes is not None and ABSTAIN in classes:
        raise OptionError(
            f"a class is called {ABSTAIN!r}, which --abstain-below uses as a label; needed: another name. Rename the "
            "class with --classes."
        )


def csv_lines(rows: Sequence[Sequence[object]]) -> bytes:
    """Return rows as lines of CSV in UTF-8, numbers with six digits."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        writer.writerow([f"{v:.6g}" if isinstance(v, float) else v for v in row])
    return text.getvalue().encode()


def as_dicts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return rows as JSON objects."""
    return [dict(zip(COLUMNS, row, strict=True)) for row in rows]


class InMemory:
    """A table in memory, for answers that are printed."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def add(self, rows: Sequence[Row]) -> None:
        """Keep the rows."""
        self.rows += rows


class _Csv:
    def __init__(self, file: Any) -> None:
        self._file = file
        file.write(csv_lines([COLUMNS]))

    def add(self, rows: Sequence[Row]) -> None:
        self._file.write(csv_lines(rows))


class _Parquet:
    def __init__(self, file: Any) -> None:
        self._arrow = arrow()
        import pyarrow.parquet as parquet

        kinds = [self._arrow.string()] * 2 + [self._arrow.float64()] * 3
        self._schema = self._arrow.schema(list(zip(COLUMNS, kinds, strict=True)))
        self._writer = parquet.ParquetWriter(file, self._schema)

    def add(self, rows: Sequence[Row]) -> None:
        columns = [list(column) for column in zip(*rows, strict=True)]
        self._writer.write_table(self._arrow.table(columns, schema=self._schema))

    def close(self) -> None:
        self._writer.close()


def check_ending(path: Path | None) -> None:
    """Raise unless the file is a .csv, or a .parquet that can be written."""
    if path is None or path.suffix == ".csv":
        return
    if path.suffix != ".parquet":
        raise OptionError(f"--out {path} ends in neither .csv nor .parquet; needed: one of them. Rename it.")
    arrow()


def arrow() -> Any:
    """Return pyarrow, or raise with how to install it."""
    try:
        import pyarrow
    except ImportError as error:
        raise UndriftError(
            "pyarrow is not installed; needed to write .parquet. Install it: pip install 'undrift[parquet]', or write "
            "a .csv."
        ) from error
    return pyarrow


@contextmanager
def table_in(path: Path | None) -> Iterator[Table]:
    """Give a table that becomes the file if the `with` block succeeds; without a path, a table in memory."""
    if path is None:
        yield InMemory()
        return
    with writing(path) as file:
        if path.suffix == ".csv":
            yield _Csv(file)
            return
        table = _Parquet(file)
        yield table
        table.close()
