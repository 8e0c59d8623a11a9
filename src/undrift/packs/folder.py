"""Read the packs of a folder, and report what is wrong with damaged ones."""

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from undrift._errors import DataError
from undrift.packs.domain_file import DomainFile, inspect


@dataclass(frozen=True)
class PackFolder:
    """The packs of one folder; prints as a table.

    Attributes:
        path: of the folder.
        packs: those that can be loaded, by name.
        damaged: the others by file name, each with its error.
        others: safetensors files that are no packs, such as the source network.
    """

    path: Path
    packs: tuple[DomainFile, ...]
    damaged: dict[str, DataError]
    others: tuple[str, ...] = ()

    @property
    def shared_names(self) -> dict[str, list[str]]:
        """Names that several packs have, each with their files."""
        counts = Counter(pack.name for pack in self.packs)
        return {name: [p.path.name for p in self.packs if p.name == name] for name in counts if counts[name] > 1}

    def __str__(self) -> str:
        lines = [("name", "bytes", "made", "images", "estimate")]
        lines += [
            (
                pack.name,
                f"{pack.size:,}",
                pack.created or "–",
                "–" if pack.images is None else f"{pack.images:,}",
                _estimate(pack),
            )
            for pack in self.packs
        ]
        lines += [
            (Path(file).stem, f"{(self.path / file).stat().st_size:,}", "–", "–", "damaged") for file in self.damaged
        ]
        widths = [max(len(line[i]) for line in lines) for i in range(5)]
        shown = [
            "  ".join(
                cell.ljust(width) if place in (0, 4) else cell.rjust(width)
                for place, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        return "\n".join([shown[0], "─" * (sum(widths) + 8), *shown[1:]])


def read_folder(path: str | os.PathLike[str]) -> PackFolder:
    """Return the packs among a folder's .safetensors files.

    Raises:
        DataError: there is no such folder, or no pack in it.
    """
    place = Path(path)
    try:
        files = sorted(file for file in place.iterdir() if file.suffix == ".safetensors")
    except OSError as error:
        raise DataError(
            f"{place} is no folder that can be read ({error.strerror or error}); needed: a folder of packs. Name it, "
            "or look at one file with `undrift inspect`."
        ) from error
    read = {file.name: _read(file) for file in files}
    packs = [found for found in read.values() if isinstance(found, DomainFile)]
    wrong = {name: found for name, found in read.items() if isinstance(found, DataError)}
    others = tuple(name for name, error in wrong.items() if "undrift_format" in str(error))  # whole, of something else
    damaged = {name: error for name, error in wrong.items() if name not in others}
    if not packs and not damaged:
        raise DataError(
            f"{place} holds no pack ({len(others)} other .safetensors files); needed: files written by undrift.save. "
            "Name their folder, or make one with `undrift adapt`."
        )
    return PackFolder(place, tuple(sorted(packs, key=lambda pack: pack.name)), damaged, others)


def _read(file: Path) -> DomainFile | DataError:
    try:
        return inspect(file)
    except DataError as error:
        return error


def _estimate(pack: DomainFile) -> str:
    if pack.estimate is not None:
        return f"{pack.estimate:.1%}"
    verdict = pack.facts.get("verdict")
    return verdict.partition(":")[0] if isinstance(verdict, str) else "–"
