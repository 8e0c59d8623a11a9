"""Open the user's own images without labels: a folder, a tar, a list of files, an array, or one image."""

from __future__ import annotations

import re
from os import PathLike
from pathlib import Path

from undrift._errors import DataError
from undrift.images.domains import FileDomain
from undrift.images.preprocess import RAW, Preprocess, checked
from undrift.images.sources import ENDINGS, ArraySource, FileSource, Source, is_image, open_array
from undrift.images.tar import tar_sources
from undrift.images.tree import contents, folder_sources

LAYOUT = (
    "a folder or an uncompressed .tar of images, a .txt with one path per line, a .npy of uint8 N×H×W×3, or an image "
    f"({', '.join(ending.removeprefix('.') for ending in ENDINGS)})"
)


def domain(path: str | PathLike[str], *, preprocess: Preprocess = RAW) -> FileDomain:
    """Return the images at a path as a domain without labels: `named_batches` gives (images, names).

    Args:
        path: a folder (searched recursively, links followed, hidden files and folders left out), a tar (read in
            place), a text file with one path per line (relative to the file; a label after the path, as in SHOT's
            lists, is ignored), a .npy of uint8 N×H×W×3 or N×H×W (memory-mapped), or one image. EXIF orientation is
            ignored, as in torchvision's ImageFolder and Pillow's open.
        preprocess: what the network expects, such as `undrift.images.IMAGENET`.

    Example:
        >>> batches = domain("clinic-b", preprocess=IMAGENET).named_batches(64)  # doctest: +SKIP
        >>> for pictures, names in batches: ...                                                   # doctest: +SKIP
        >>> print(batches.skipped)                                                                # doctest: +SKIP
        3 of 1200 images could not be read and were skipped: clinic-b/7.jpg (image file is truncated), …
    """
    checked(preprocess)
    place = Path(path)
    if not place.exists():
        raise DataError(f"there is no {place}; needed: {LAYOUT}. Check the path.")
    sources = _sources(place)
    if not sources:
        raise DataError(f"{contents(place)}, no image among it; needed: {LAYOUT}. Check the path and the endings.")
    return FileDomain(place.name, sources, preprocess=preprocess)


def _sources(place: Path) -> tuple[Source, ...]:
    if place.is_dir():
        return tuple(folder_sources(place))
    if place.suffix == ".tar":
        return tuple(tar_sources(place))
    if place.suffix == ".txt":
        return tuple(FileSource(str(place.parent / name)) for name in _listed(place))
    if place.suffix == ".npy":
        return tuple(ArraySource(str(place), row) for row in range(len(open_array(place))))
    return (FileSource(str(place)),) if is_image(place.name) else ()


def _listed(path: Path) -> list[str]:
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text ({error}); needed: one path per line, in UTF-8. Save it so.") from error
    return [line if is_image(line) else re.sub(r"\s+\d+$", "", line) for line in lines if line]
