"""Turn predictions into rows, and write rows as CSV or Parquet."""

import csv
import importlib
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from undrift._errors import OptionError, UndriftError
from undrift.cli.class_names import class_name
from undrift.posterior.outputs import per_image
from undrift.system.atomic import writing

if TYPE_CHECKING:
    from undrift.answer.prediction import Prediction

COLUMNS = ("path", "label", "probability", "entropy", "mutual_information")
ABSTAIN = "abstain"
PACK = "pack"
"""The column of answers with several packs: which one gave each."""

Row = tuple[Any, ...]
Add = Callable[[Sequence[Row]], object]


def rows_of(
    names: Sequence[str], prediction: "Prediction", classes: tuple[str, ...] | None, abstain_below: float | None
) -> list[Row]:
    """Return one row per image; the label is "abstain" below the threshold and empty without a finite answer.

    An answer that comes from one of several packs says which at its end.
    """
    per_image(prediction.probs, "a table of answers")
    found = prediction.cpu()
    numbers = (found.label.tolist(), found.probs.amax(1).tolist(), found.entropy.tolist(), found.mutual_info.tolist())
    rows = []
    for name, label, probability, entropy, mutual in zip(names, *numbers, strict=True):
        unsure = label >= 0 and abstain_below is not None and probability < abstain_below
        rows.append((name, ABSTAIN if unsure else class_name(classes, label), probability, entropy, mutual))
    packs = getattr(found, PACK, None)
    return rows if packs is None else [(*row, pack) for row, pack in zip(rows, packs, strict=True)]


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
    return [dict(zip(columns_of(len(row) > len(COLUMNS)), row, strict=True)) for row in rows]


def columns_of(packs: bool) -> tuple[str, ...]:
    """Return the columns of answers, with that of several packs."""
    return (*COLUMNS, PACK) if packs else COLUMNS


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
def rows_in(path: Path, packs: bool = False) -> Iterator[Add]:
    """Give a function that adds rows to a .csv or .parquet, which appears if the `with` block succeeds."""
    columns = columns_of(packs)
    with writing(path) as file:
        if path.suffix == ".csv":
            file.write(csv_lines([columns]))
            yield lambda rows: file.write(csv_lines(rows))
            return
        pyarrow = arrow()
        parquet = importlib.import_module("pyarrow.parquet")
        kinds = [pyarrow.string()] * 2 + [pyarrow.float64()] * 3 + [pyarrow.string()] * packs
        schema = pyarrow.schema(list(zip(columns, kinds, strict=True)))
        with parquet.ParquetWriter(file, schema) as writer:
            yield lambda rows: writer.write_table(
                pyarrow.table([list(column) for column in zip(*rows, strict=True)], schema=schema)
            )
