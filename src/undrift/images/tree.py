"""Read trees with one folder per class, on disk or in a tar."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

import torch

from undrift._errors import OptionError
from undrift.images.domains import FileDomain, shuffle
from undrift.images.preprocess import Preprocess
from undrift.images.sources import FileSource, Source, is_image
from undrift.images.tar import common_start, tar_sources

Classes = dict[str, list[Source]]


def labelled(
    name: str, classes: Classes, class_names: Sequence[str], preprocess: Preprocess, seed: int | None
) -> FileDomain:
    """Return the domain of a tree, shuffled with `seed` (None keeps it sorted by class)."""
    pairs = [(source, label) for label, key in enumerate(class_names) for source in classes.get(key, ())]
    labels = torch.tensor([label for _, label in pairs], dtype=torch.long)
    domain = FileDomain(name, tuple(source for source, _ in pairs), labels, tuple(class_names), preprocess)
    return domain if seed is None else shuffle(domain, seed)


def read_classes(place: Path) -> Classes:
    """Return the images of each class, sorted by name, of a folder CLASS/… or of a tar CLASS/….

    A tar often holds the folder itself (photo/CLASS/…), so folders that all images share are no classes, as long as
    each image keeps one. As in a folder, an image beside the classes has none.
    """
    if place.is_dir():
        folders = sorted(path for path in place.iterdir() if path.is_dir() and not path.name.startswith("."))
        return {folder.name: list(folder_sources(folder)) for folder in folders}
    found = [(_folders(source.member), source) for source in sorted(tar_sources(place), key=lambda s: s.member)]
    holding = {above for above, _ in found if above}
    parents = {above[:depth] for above in holding for depth in range(len(above))}
    # A folder with images and folders may hold the classes (photo/preview.png) or be one (dog/1.png, dog/left/2.png).
    for those in (holding - parents, holding):
        shared = common_start(above[:-1] for above in those)
        classes: Classes = {}
        for above, source in found:
            if len(above) > shared:
                classes.setdefault(above[shared], []).append(source)
        if len(classes) > 1:
            break
    return classes


def _folders(member: str) -> tuple[str, ...]:
    return tuple(part for part in PurePosixPath(member).parent.parts if part not in ("/", ".."))


def folder_sources(folder: Path) -> Iterable[FileSource]:
    """Yield the images below a folder, sorted by path, without hidden ones; links to folders are followed.

    A link to a folder that the walk reaches anyway is not followed, as it could rename the images.
    """
    root, seen = Path(os.path.realpath(folder)), set[str]()
    for parent, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(parent)
        if real in seen:  # a link to a folder above would loop
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and not _met_anyway(Path(parent, name), root)
        )
        yield from (FileSource(str(Path(parent, name))) for name in sorted(files) if is_image(name))


def _met_anyway(path: Path, root: Path) -> bool:
    """Return whether a folder is a link to one below the root that is not hidden, and so is walked anyway."""
    real = Path(os.path.realpath(path)) if path.is_symlink() else None
    return (
        real is not None
        and real.is_relative_to(root)
        and not any(part.startswith(".") for part in real.relative_to(root).parts)
    )


def contents(root: Path) -> str:
    """Describe what is at a path."""
    if not root.exists():
        return f"there is no {root}"
    if not root.is_dir():
        return f"{root} is a file of {root.stat().st_size} bytes"
    names = sorted(path.name for path in root.iterdir())
    return f"{root} holds {', '.join(names[:5])}{', …' if len(names) > 5 else ''}" if names else f"{root} is empty"


def choose(name: str, known: Iterable[str], what: str) -> None:
    """Raise if `name` is unknown; suggest the closest known one."""
    known = tuple(known)
    if name not in known:
        close = difflib.get_close_matches(name.lower().replace(" ", "_").replace("-", "_"), known, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else "Choose one of these."
        raise OptionError(f"there is no {what} {name!r}; known: {', '.join(known)}. {hint}")
