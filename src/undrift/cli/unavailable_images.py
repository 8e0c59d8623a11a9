"""Distinguish damaged images from unavailable ones (an unmounted disk, a folder that was moved)."""

import errno
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from undrift._errors import DataError
from undrift.images.sources import ArraySource, FileSource, LostSource, Source, TarSource

NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ENOTCONN)


def check_available(sources: Sequence[Source], broken: Mapping[str, str]) -> None:
    """Raise if one of the images that could not be read is out of reach, as it must not count as damaged for good.

    An error of the system means that if the image is there again, or its folder is not, or neither the first nor the
    last image of the stream is. A single file that was deleted counts as damaged.

    Args:
        broken: images that could not be read, each with its reason.
    """
    for name, reason in broken.items():
        number = re.search(r"\[Errno (\d+)\]", reason)
        if number is None:
            continue
        back = int(number[1]) in NOT_THERE and _exists(name)
        if back or _folder_gone(sources, name) or not any(_there(sources[place]) for place in (0, -1)):
            raise DataError(
                f"{name} is out of reach ({reason}); needed: the images that were there when the stream began. Mount "
                "or restore their folder and run the same command again; with --state it goes on where it stopped."
            )


def _folder_gone(sources: Sequence[Source], name: str) -> bool:
    return isinstance(sources[0], FileSource) and not _exists(Path(name).parent)


def _there(source: Source) -> bool:
    if isinstance(source, TarSource | LostSource):
        return _exists(source.tar)
    return not isinstance(source, FileSource | ArraySource) or _exists(source.path)


def _exists(path: str | Path) -> bool:
    try:
        Path(path).stat()
    except OSError:  # `Path.exists` raises some, such as those of a network drive that is not connected
        return False
    return True
