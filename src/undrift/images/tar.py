"""Find the images of a tar in one pass over its headers, following links."""

from __future__ import annotations

import posixpath
import tarfile
from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path, PurePosixPath

from undrift._errors import DataError
from undrift.images.sources import LostSource, TarSource, is_image
from undrift.system.warning import warn

MOST_LINKS = 40
"""Links from one image to the next before they count as a circle: as many as Linux follows."""


def tar_sources(path: Path) -> list[TarSource | LostSource]:
    """Return the images of a tar in its own order, hidden files and folders left out.

    A hidden folder that holds all of them does not count as hidden.
    """
    try:
        with tarfile.open(path, "r:") as tar:  # uncompressed only, as members are read by offset
            members = list(tar)
    except (tarfile.TarError, OSError) as error:
        raise DataError(
            f"{path} cannot be read as a tar ({error}); needed: an uncompressed .tar, as its images are read in place. "
            "Decompress it first (gunzip), or copy it again if it is cut short."
        ) from error
    by_name = {posixpath.normpath(member.name): member for member in members}
    _warn_of_folders(path, members, by_name)
    images = [member for member in members if (member.isreg() or _is_link(member)) and is_image(member.name)]
    parts = [PurePosixPath(member.name).parts for member in images]
    top = common_start(names[:-1] for names in parts)
    return [
        _tar_source(str(path), member, by_name)
        for member, names in zip(images, parts, strict=True)
        if not _is_hidden(names[top:])
    ]


def common_start(paths: Iterable[Sequence[str]]) -> int:
    """Return how many folders, from the top, all paths have in common."""
    return len(list(takewhile(lambda names: len(set(names)) == 1, zip(*paths, strict=False))))


def _tar_source(tar: str, member: tarfile.TarInfo, by_name: dict[str, tarfile.TarInfo]) -> TarSource | LostSource:
    """Return a member, or what it links to under its name, as tar stores a file with two names once."""
    found = _followed(member, by_name)
    if found is None or not found.isreg():
        return LostSource(tar, member.name, f"a link to {member.linkname}, which is not in the tar")
    if found.issparse():
        return LostSource(tar, member.name, "stored as a sparse file, which cannot be read in place")
    return TarSource(tar, member.name, found.offset_data, found.size)


def _followed(member: tarfile.TarInfo, by_name: dict[str, tarfile.TarInfo]) -> tarfile.TarInfo | None:
    """Return what a member links to, or the member itself; None if that is not in the tar."""
    found: tarfile.TarInfo | None = member
    for _ in range(MOST_LINKS):
        if found is None or not _is_link(found):
            break
        start = posixpath.dirname(found.name) if found.issym() else ""  # a hard link counts from the top of the tar
        found = by_name.get(posixpath.normpath(posixpath.join(start, found.linkname)))
    return found


def _warn_of_folders(path: Path, members: Sequence[tarfile.TarInfo], by_name: dict[str, tarfile.TarInfo]) -> None:
    """Warn of links to folders or out of the tar, which are left out; on a disk a class may be one."""
    links = [member for member in members if member.issym() and not posixpath.splitext(member.name)[1]]
    ends = [_followed(member, by_name) for member in links]
    out = [f"{m.name} to {m.linkname}" for m, end in zip(links, ends, strict=True) if end is None or not end.isreg()]
    if out:
        some = ", ".join(out[:3]) + ", …" * (len(out) > 3)
        warn(
            f"{path} holds links to folders, or to nothing in it ({some}), which are left out; needed: the folders "
            "themselves, if their images are wanted. Make it with `tar --dereference`."
        )


def _is_link(member: tarfile.TarInfo) -> bool:
    return member.islnk() or member.issym()


def _is_hidden(parts: Sequence[str]) -> bool:
    return any(part.startswith(".") and part != ".." for part in parts)
