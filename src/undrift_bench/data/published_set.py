"""Read published data sets of several domains, and check them against their publication."""

import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from undrift._errors import DataError, UndriftWarning
from undrift.images.domains import FileDomain
from undrift.images.preprocess import Preprocess
from undrift.images.tree import choose, contents, labelled, read_classes


@dataclass(frozen=True)
class PublishedSet:
    """What a benchmark of several domains publishes.

    Args:
        title: its name.
        domains: for each domain its folder (with other spellings of it) and its number of images.
        class_names: the class folders of every domain.
        inside: folders between the root and the domains, in some copies.
        below: a folder between a domain and its classes, in some copies.
        origin: where it comes from.
    """

    title: str
    domains: Mapping[str, tuple[tuple[str, ...], int]]
    class_names: tuple[str, ...]
    origin: str
    inside: tuple[str, ...] = ()
    below: str = ""

    def load(self, root: str | os.PathLike[str], domain: str, preprocess: Preprocess, seed: int | None) -> FileDomain:
        """Return one domain, or raise or warn about what is wrong with the folder."""
        choose(domain, self.domains, f"{self.title} domain")
        spellings, images = self.domains[domain]
        folders = [
            Path(root, *between, name) for between in ((), *((part,) for part in self.inside)) for name in spellings
        ]
        place = first_existing([path for folder in folders for path in (folder / self.below, folder, f"{folder}.tar")])
        layout = f"{spellings[0]}/CLASS/IMAGE with {len(self.class_names)} classes, or {spellings[0]}.tar"
        if place is None:
            raise layout_error(Path(root), layout, self.origin)
        classes = read_classes(place)
        missing = [name for name in self.class_names if not classes.get(name)]
        unknown = sorted(classes.keys() - set(self.class_names))
        if missing or unknown:
            raise DataError(
                f"{place} has {len(classes)} class folders, {_some(missing)} missing and {_some(unknown)} unknown; "
                f"needed: {layout}, each class with its images. {self.origin}"
            )
        found = sum(len(sources) for sources in classes.values())
        if found != images:
            warnings.warn(
                f"{place} has {found} images; {self.title} publishes {images} for {domain}. The copy is partial or "
                "changed: results will not compare with published ones.",
                UndriftWarning,
                stacklevel=3,
            )
        return labelled(f"{self.title} {domain}", classes, self.class_names, preprocess, seed)


def first_existing(paths: Iterable[str | Path]) -> Path | None:
    """Return the first path that exists."""
    return next((Path(path) for path in paths if Path(path).exists()), None)


def layout_error(root: Path, layout: str, origin: str) -> DataError:
    """Return the error for a root that does not hold what it should."""
    return DataError(f"{contents(root)}; needed: {layout}. {origin}")


def _some(names: list[str]) -> str:
    return f"{len(names)} ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})" if names else "0"
