"""Checksums of a domain's content, to check that a run resumes with the same images."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from undrift.images.domains import Domain, TensorDomain
from undrift.images.sources import Source, TarSource

CHUNK = 4096
"""Images hashed at once, so that those on a GPU come back in parts."""


def checksum(domain: Domain) -> str:
    """Return 16 hex digits: of the pixels in memory, or of the path and size of each file.

    Files are not read, as that would take as long as the work itself. Paths are relative to the common folder, so that
    a copy is the same domain.
    """
    if not isinstance(domain, TensorDomain):
        return files_checksum(domain.sources)
    digest = hashlib.sha256(f"{domain.images.dtype} {tuple(domain.images.shape)}".encode())
    for chunk in domain.images.split(CHUNK):
        digest.update(chunk.cpu().contiguous().view(-1).numpy())
    return digest.hexdigest()[:16]


def files_checksum(sources: Sequence[Source]) -> str:
    """Return 16 hex digits of the path and size of each image, in this order."""
    paths, size = [Path(source.name).absolute() for source in sources], cache(_size)  # an array has many rows
    start = len(os.path.commonpath([path.parent for path in paths])) if paths else 0
    digest = hashlib.sha256()
    for path, source in zip(paths, sources, strict=True):
        count = source.size if isinstance(source, TarSource) else size(getattr(source, "path", str(path)))
        digest.update(os.fsencode(f"{str(path)[start:]} {count}\n"))  # a path need not be UTF-8
    return digest.hexdigest()[:16]


def _size(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except OSError:  # gone, or no file
        return -1
