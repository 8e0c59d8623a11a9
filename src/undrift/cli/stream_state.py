"""Write and read the state of a stream, and check that it belongs to the same network, options and images.

Images may have been added after those already answered.
"""

import csv
import io
import itertools
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from undrift._errors import DataError
from undrift.cli.image_arguments import name_of
from undrift.images import Domain
from undrift.packs.fingerprint import fingerprint
from undrift.posterior.perturbed import Perturbed
from undrift.system.atomic import write_bytes
from undrift.system.weights_file import UNREADABLE

FORMAT = "undrift stream 2"
FIRST_FORMAT = "undrift stream 1"
"""Has one checksum for all images, and so resumes with exactly these."""


REMEMBERED = 1000
"""Unreadable images that a state names."""


@dataclass(frozen=True)
class Saved:
    """The saved state of a stream.

    Attributes:
        position: how many images are done.
        offset: how many bytes of the answers belong to them.
        checksum: CRC-32 of those bytes.
        skipped: images that could not be read so far, each with its reason.
        stream: `Stream.state_dict()`.
        identity: what must be equal for a stream to resume.
        names: CRC-32 of the names of the images that are done; None in the first format.
        out: the resolved path of the domain file that the stream will write.
        part: number of the file of answers, as full ones are moved aside.
        unreadable: how many images could not be read; `skipped` names the latest of them.
    """

    position: int
    offset: int
    checksum: int
    skipped: Mapping[str, str]
    stream: Mapping[str, Any]
    identity: Mapping[str, Any]
    names: int | None = None
    out: str | None = None
    part: int = 1
    unreadable: int = 0


def latest(skipped: Mapping[str, str]) -> dict[str, str]:
    """Return the last thousand images that could not be read: a state stays small however long a stream runs."""
    return dict(itertools.islice(skipped.items(), max(0, len(skipped) - REMEMBERED), None))


def identity_of(model: Perturbed, images: Domain, domain_file: Path | None) -> dict[str, Any]:
    """Return what must be equal of network and preprocessing for a stream to resume."""
    return {
        "source network": fingerprint(model),
        "domain file": None if domain_file is None else zlib.crc32(domain_file.read_bytes()),
        "preprocessing": images.preprocess.to_dict(),
        "classes": model.classes,
    }


class Names:
    """A running checksum of image names."""

    def __init__(self, images: Domain) -> None:
        self._images, self._count, self._sum = images, 0, 0

    def up_to(self, position: int) -> int:
        """Return the checksum of the first `position` names, which may only grow between calls."""
        for place in range(self._count, position):
            name = f"{name_of(self._images, place)}\n"
            self._sum = zlib.crc32(name.encode(errors="surrogateescape"), self._sum)
        self._count = position
        return self._sum


def write_state(path: Path, saved: Saved) -> None:
    """Write a state, whole or not at all."""
    content = io.BytesIO()
    torch.save({"undrift": FORMAT, **vars(saved)}, content)
    write_bytes(path, content.getvalue())


def read_state(path: Path) -> Saved | str:
    """Return the state in a file, or the reason why it holds none; nothing in the file is executed."""
    try:
        content = path.read_bytes()
    except OSError as error:  # it may be a state, so nothing may replace it
        raise DataError(
            f"{path} cannot be read ({error.strerror or error}); needed: the stream's state. Check its "
            "permissions and the disk; to start over, remove it."
        ) from error
    try:
        found: Any = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        if not isinstance(found, dict) or found.pop("undrift", None) not in (FORMAT, FIRST_FORMAT):
            raise ValueError("another kind of file")
        return Saved(**found)
    except MemoryError:
        raise
    except UNREADABLE as error:
        what = (str(error) or "no reason given").splitlines()[0]
        return f"{type(error).__name__}: {what}"


def differences(saved: Saved, identity: Mapping[str, Any], images: Domain, answers: Path) -> list[str]:
    """Return in words what differs between a state and this stream; nothing if the state is this stream's."""
    ours = dict(identity)
    if saved.names is None:
        names = "\n".join(name_of(images, place) for place in range(len(images)))
        ours["number of images"] = len(images)
        ours["names of images"] = zlib.crc32(names.encode(errors="surrogateescape"))
        ours["preprocessing"] = str(images.preprocess)
        return _differences(saved.identity, ours)
    found = _differences(saved.identity, ours)
    few = len(images) < saved.position
    if few or Names(images).up_to(saved.position) != saved.names:
        found.append(_other_images(saved, images, answers))
    return found


def _differences(theirs: Mapping[str, Any], ours: Mapping[str, Any], of: str = "") -> list[str]:
    found = []
    for name in dict.fromkeys((*ours, *theirs)):
        there, here = theirs.get(name), ours.get(name)
        if isinstance(there, Mapping) and isinstance(here, Mapping):
            found += _differences(there, here, f"{name} ")
        elif there != here:
            found.append(f"{of}{name} {_part(there, here)} there, {_part(here, there)} here")
    return found


def _part(value: object, other: object, width: int = 32) -> str:
    """Return a value as text: all of it, or the part that differs from another."""
    text, against = str(value), str(other)
    if len(text) <= width:
        return text
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(text, against, strict=False)))
    start = max(0, same - 8)
    return ("…" if start else "") + text[start : start + width] + ("…" if start + width < len(text) else "")


def _other_images(saved: Saved, images: Domain, answers: Path) -> str:
    """Return from which image on the names differ, by comparing them with the answers."""
    places = range(min(saved.position, len(images)))
    if saved.part > 1 or saved.unreadable > len(saved.skipped):  # the answers are in several files, or names are lost
        return "other names of images"
    names = [name for name in (name_of(images, place) for place in places) if name not in saved.skipped]
    try:
        with answers.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
            paths = (row[0] for row in itertools.islice(csv.reader(file), 1, None) if row)
            for here, there in zip(names, paths, strict=False):
                if here != there:
                    number = next(place for place in places if name_of(images, place) == here) + 1
                    return f"other names from image {number:,} on, {there} there, {here} here"
    except (OSError, csv.Error):
        pass  # without the answers, the place is unknown
    if len(images) < saved.position:
        return f"{saved.position:,} images were done there, {len(images):,} are here"
    return "other names of images"
