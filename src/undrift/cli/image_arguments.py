"""Open the images of a command: a folder, tar, list, array, or data set by name."""

import errno
import itertools
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import undrift
from undrift._errors import DataError
from undrift.cli.extensions import data_sets, extensions
from undrift.images import Batches, Domain, FileDomain, Preprocess, Skipped, TensorDomain
from undrift.images.sources import ArraySource, FileSource, LostSource, Source, TarSource

if TYPE_CHECKING:
    import torch


Root = Annotated[Path, typer.Option(help="Folder of data sets given by name.", metavar="FOLDER", hidden=True)]
SETTLED = 10.0
"""Seconds without a change after which a file counts as complete."""


@dataclass(frozen=True, eq=False)
class WatchedImages(FileDomain):
    """A domain that remembers its batches, and so which images could not be read."""

    made: list[Batches[Any]] = field(default_factory=list)

    def _batches(self, *how: Any) -> Batches[Any]:
        batches: Batches[Any] = super()._batches(*how)
        self.made.append(batches)
        return batches


@dataclass(frozen=True)
class Reader:
    """Opens images with a network's preprocessing.

    Attributes:
        root: the folder of data sets given by name.
        preprocess: what is done to each image.
        resize_given: whether the user asked for the resize; it then applies to images of fixed size too.
    """

    root: Path
    preprocess: Preprocess
    resize_given: bool = False

    def images(self, text: str) -> Domain:
        """Return the images at a path or of a named data set, without their labels."""
        if (named := self.named(text)) is not None:
            return named
        try:
            return watched(undrift.images.domain(text, preprocess=self.preprocess))
        except DataError as error:
            if Path(text).exists():
                raise
            raise DataError(f"{error} Data sets by name: {data_sets()}.") from error

    def named(self, text: str) -> Domain | None:
        """Return a data set by name, or None if the text is a path or an unknown name.

        ImageNet-C and val5k are 224×224 already and are not resized.
        """
        if Path(text).exists() or (found := data_set(text, self.root)) is None:
            return None
        own, crop = found.preprocess, self.preprocess.crop
        whole = own.crop if isinstance(found, FileDomain) and own.resize is None else None
        fits = whole is not None and crop is not None and crop <= whole
        as_it_is = fits and not self.resize_given
        return watched(found.prepared(self.preprocess.without_resize() if as_it_is else self.preprocess))


def watched(domain: Domain) -> Domain:
    """Return the domain as `WatchedImages` if it is read from files."""
    if isinstance(domain, TensorDomain):
        return domain
    return WatchedImages(**{f.name: getattr(domain, f.name) for f in fields(FileDomain)})


def skipped_of(*domains: Domain) -> dict[str, str]:
    """Return the images that could not be read, each with its reason."""
    out: dict[str, str] = {}
    for domain in domains:
        if isinstance(domain, TensorDomain):
            out |= domain.skipped.reasons
        elif isinstance(domain, WatchedImages):
            for batches in domain.made:
                out |= batches.skipped.reasons
    return out


class InOrder:
    """The batches of a domain in order, from a position on; it tracks where the last batch ended.

    Attributes:
        names: names of the images in the last batch.
        position: how many images of the domain are done, unreadable ones included.
        unfinished: unreadable images at the end that may still be being written; a resumed stream begins with them.
        ready: when the last batch was ready, as `time.perf_counter` counts.
    """

    def __init__(
        self, domain: Domain, batch_size: int, position: int, device: "torch.device", goes_on: bool = False
    ) -> None:
        self.domain: Domain = domain.select(range(position, len(domain))) if position else domain
        self.names: list[str] = []
        self.position, self._start, self._size, self._device = position, position, batch_size, device
        self.unfinished: list[str] = []
        self.ready = time.perf_counter()
        self._goes_on, self._begun, self._ticks = goes_on, time.time(), time.monotonic()

    def __iter__(self) -> "Iterator[torch.Tensor]":
        domain, size, last = self.domain, self._size, -1
        if isinstance(domain, TensorDomain):
            batches = domain._batches(list, size, None, False)
        else:
            # If images were read before, all remaining ones may be broken: that is the end of a stream, no error.
            batches = domain._batches(list, size, None, False, "cpu", None, self._start > 0)
            batches.warns = False  # some may be out of reach, or unfinished: neither is skipped
        broken = 0
        for images, places in batches:
            broken = self._check(batches, broken)
            self.names = [name_of(domain, place) for place in places]
            last = places[-1]
            # Batches start at multiples of their size, even if some of their images could not be read.
            end = (last // size + 1) * size
            self.position = self._start + (end if end < len(domain) else self._finished(last + 1))
            images = images.to(self._device)
            self.ready = time.perf_counter()
            yield images
        self._check(batches, broken)
        self.position = self._start + self._finished(max(last + 1, self.position - self._start))
        if not isinstance(domain, TensorDomain) and (reasons := self.skipped()):
            Skipped(len(domain), reasons).warn()

    def __length_hint__(self) -> int:
        return -(-len(self.domain) // self._size)

    def skipped(self) -> dict[str, str]:
        """Return the images that could not be read, each with its reason, without the unfinished ones."""
        return {name: why for name, why in skipped_of(self.domain).items() if name not in self.unfinished}

    def _check(self, batches: "Batches[list[int]]", known: int) -> int:
        """Raise if an image that could not be read since the last check is out of reach; return how many there are."""
        if isinstance(self.domain, FileDomain):
            reasons = batches.skipped.reasons
            check_available(self.domain.sources, dict(itertools.islice(reasons.items(), known, None)))
        return len(batches.skipped.reasons)

    def _finished(self, least: int) -> int:
        """Return how many images (at least `least`) are done: all but those at the end that just changed."""
        count = len(self.domain)
        while self._goes_on and count > least and self._just_written(count - 1):
            count -= 1
        self.unfinished = [name_of(self.domain, place) for place in range(count, len(self.domain))]
        return count

    def _just_written(self, place: int) -> bool:
        source = None if isinstance(self.domain, TensorDomain) else self.domain.sources[place]
        if not isinstance(source, FileSource):
            return False
        try:
            changed = Path(source.path).stat().st_mtime
        except OSError:
            return False
        now = time.time()
        if abs((now - self._begun) - (time.monotonic() - self._ticks)) > SETTLED:
            return True  # the clock was set: nobody knows how old the file is, and the next run does
        # The upper bound: a date far in the future would postpone the image in every run.
        return self._begun - SETTLED < changed < now + SETTLED


def name_of(domain: Domain, place: int) -> str:
    """Return the name of the image at this place."""
    return domain.name_of(place) if isinstance(domain, TensorDomain) else domain.sources[place].name


def data_set(text: str, root: Path, train: bool = False) -> Domain | None:
    """Return a data set by name, or None for an unknown name."""
    found = (extension.data_set(text, root, train) for extension in extensions())
    return next((known for known in found if known is not None), None)


def first_images(domain: Domain, count: int) -> "torch.Tensor":
    """Return the first few readable images, preprocessed; they are decoded in this process."""
    if isinstance(domain, TensorDomain):
        return next(iter(domain.named_batches(count)))[0]
    return next(iter(domain.named_batches(count, workers=0)))[0]


def hold_if_small(domain: Domain, device: "torch.device") -> Domain:
    """Return the domain in memory if it fits into 1 GiB, so that each image is decoded once."""
    if isinstance(domain, TensorDomain):
        return domain.to(device)
    return domain.hold(device) if first_images(domain, 1).numel() * len(domain) <= 2**30 else domain


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
