"""Answer images part by part, by any number of processes on any number of machines that share a folder.

Each process locks the next part without a file, and writes that file whole or not at all. The lock of a killed process
is released, so another process takes its part. The process that finds all parts complete checks that each image is in
them once, and joins them into one file.
"""

import csv
import importlib
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from undrift._errors import DataError, OptionError
from undrift.system.atomic import sweep, write_text, writing
from undrift.system.lock import held
from undrift.system.ranks import part_of

PAUSE = 0.5
"""Seconds between two looks at what others hold."""


class AnswerParts:
    """The parts of one file of answers.

    Args:
        out: the file that all parts become.
        names: of the images, in order.
        identity: what the answers depend on; every process has to be asked for the same.
    """

    def __init__(
        self, out: Path, count: int, names: Sequence[str], batch_size: int, identity: Mapping[str, Any]
    ) -> None:
        self.out, self.count, self.names, self.batch_size = out, count, names, batch_size
        self.folder = out.with_name(f"{out.name}.parts")
        self.identity = json.loads(
            json.dumps({**identity, "parts": count, "images": len(names), "batch size": batch_size})
        )

    @property
    def finished(self) -> bool:
        """Whether the answers are in one file already."""
        return (self.folder / "joined").exists() and self.out.exists()

    def open(self) -> None:
        """Make the folder, or check that it belongs to the same answers."""
        run = self.folder / "run.json"
        if not self.folder.exists() and self.out.exists():
            raise DataError(
                f"{self.out} exists, and was not answered in parts; needed: a free name. Give another --out, or delete "
                "that file."
            )
        self.folder.mkdir(exist_ok=True)
        if not run.exists():
            write_text(run, json.dumps(self.identity, indent=1))
        found = json.loads(run.read_text("utf-8"))
        other = [name for name in {**found, **self.identity} if found.get(name) != self.identity.get(name)]
        if other:
            raise DataError(
                f"{self.folder} holds parts of other answers (they differ in {', '.join(sorted(other))}); needed: the "
                "same command in every process. Give another --out, or delete that folder to start over."
            )
        if (self.folder / "joined").exists() and not self.out.exists():
            raise DataError(
                f"{self.folder} says that {self.out} was written, and it is not there; needed: both or none. Delete "
                "the folder to answer again."
            )

    def batches_of(self, number: int) -> tuple[int, int]:
        """Return the first batch of a part, and the first behind it: parts are whole batches, as one process makes."""
        return part_of(-(-len(self.names) // self.batch_size), number, self.count)

    def images_of(self, number: int) -> range:
        """Return the places of a part's images."""
        first, last = (batch * self.batch_size for batch in self.batches_of(number))
        return range(first, min(last, len(self.names)))

    def file(self, number: int) -> Path:
        """Return the file of one part."""
        return self.folder / f"{number + 1}-of-{self.count}{self.out.suffix}"

    def left(self) -> Iterator[int]:
        """Yield the parts that are left, one after another; each is held by this process until the next is asked for.

        It ends when every part has its file. What others hold is waited for: they may be killed.
        """
        while todo := [number for number in range(self.count) if not self._is_there(number)]:
            for number in todo:
                with held(self.folder / f".{number + 1}.lock") as mine:
                    if mine and not self._is_there(number):
                        sweep(self.file(number))
                        yield number
                        break
            else:
                time.sleep(PAUSE)

    def close(
        self, number: int, counts: Mapping[str, int], skipped: Mapping[str, str], packs: Mapping[str, int] | None = None
    ) -> None:
        """Say of a part, whose file is written, what it found: the part is finished now.

        Args:
            packs: how many of its images each pack answered.
        """
        own = {self.names[place] for place in self.images_of(number)}
        reasons = {name: why for name, why in skipped.items() if name in own}
        write_text(self._facts(number), json.dumps({"counts": counts, "packs": packs or {}, "skipped": reasons}))

    def join(self) -> tuple[Counter[str], Counter[str], dict[str, str]]:
        """Return what all parts counted, by kind and by pack, and skipped.

        Their answers become one file, unless another process has written it.
        """
        while not self.finished:
            with held(self.folder / ".join.lock") as mine:
                if mine and not self.finished:
                    self._join()
            time.sleep(0 if mine else PAUSE)
        found = json.loads((self.folder / "joined").read_text("utf-8"))
        return Counter(found["counts"]), Counter(found["packs"]), found["skipped"]

    def _join(self) -> None:
        facts = [json.loads(self._facts(number).read_text("utf-8")) for number in range(self.count)]
        skipped = {name: why for each in facts for name, why in each["skipped"].items()}
        for number in range(self.count):
            wanted = [self.names[place] for place in self.images_of(number)]
            if self._names_in(number) != [name for name in wanted if name not in skipped]:
                raise DataError(
                    f"{self.file(number)} does not hold the images of part {number + 1}, each once; needed: the file "
                    f"as undrift wrote it. Delete it and {self._facts(number).name}, and start the command again."
                )
        with writing(self.out) as file:
            if self.out.suffix == ".csv":
                for number in range(self.count):
                    header, *rows = self.file(number).read_bytes().splitlines(keepends=True)
                    file.writelines(rows if number else [header, *rows])
            else:
                parquet = importlib.import_module("pyarrow.parquet")
                with parquet.ParquetWriter(file, parquet.read_schema(self.file(0))) as writer:
                    for number in range(self.count):
                        writer.write_table(parquet.read_table(self.file(number)))
        sums = {kind: Counter[str]() for kind in ("counts", "packs")}
        for kind, total in sums.items():
            for each in facts:
                total.update(each[kind])
        write_text(self.folder / "joined", json.dumps({**sums, "skipped": skipped}))
        for number in range(self.count):
            for path in (self.file(number), self._facts(number)):
                path.unlink(missing_ok=True)

    def _names_in(self, number: int) -> list[str]:
        path = self.file(number)
        if path.suffix == ".csv":
            with path.open(newline="", encoding="utf-8") as file:
                return [row[0] for row in csv.reader(file)][1:]
        table = importlib.import_module("pyarrow.parquet").read_table(path, columns=["path"])
        return [str(name) for name in table.column("path").to_pylist()]

    def _is_there(self, number: int) -> bool:
        return self._facts(number).exists() or (self.folder / "joined").exists()

    def _facts(self, number: int) -> Path:
        return self.folder / f"{number + 1}.json"


def check_parts(count: int | None, out: Path | None, mode: str, force: bool, processes: int) -> None:
    """Raise if the images cannot be divided as asked."""
    if count is None:
        if processes > 1:
            raise OptionError(
                f"torchrun started {processes} processes of undrift predict, and each would answer all images; needed: "
                "--parts N, of which each takes the next. A few for each process are enough: --parts "
                f"{8 * processes}."
            )
        return
    found = {"no --out": out is None, f"--mode {mode}": mode != "full", "--force": force}
    if wrong := [name for name, holds in found.items() if holds]:
        raise OptionError(
            f"--parts {count} was given with {' and '.join(wrong)}; needed: a file to write, all draws, and a name "
            "that is free, as many processes write to it. Change that, or leave --parts out."
        )
