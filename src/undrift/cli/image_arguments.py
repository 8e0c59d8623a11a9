"""The images a command works on: a folder, a tar, a list, an array, or a data set by its name."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import undrift
from undrift._errors import DataError
from undrift.cli.extensions import data_sets, extensions
from undrift.images import Batches, Domain, FileDomain, Preprocess, TensorDomain
from undrift.images.sources import FileSource

if TYPE_CHECKING:
    import torch

Root = Annotated[Path, typer.Option(help="Folder of data sets given by name.", metavar="FOLDER", hidden=True)]
SETTLED = 10.0
"""Seconds without a change after which a file counts as written to its end."""


@dataclass(frozen=True, eq=False)
class WatchedImages(FileDomain):
    """A domain that remembers the batches made of it, and so which images could not be read."""

    made: list[Batches[Any]] = field(default_factory=list)

    def _batches(self, *how: Any) -> Batches[Any]:
        batches: Batches[Any] = super()._batches(*how)
        self.made.append(batches)
        return batches


@dataclass(frozen=True)
class Reader:
    """Opens images as a network wants them.

    Attributes:
        root: where data sets that are named, not pathed, lie.
        preprocess: what images get.
        resize_given: the resize was asked for, and is done to images that were resized before, too.
    """

    root: Path
    preprocess: Preprocess
    resize_given: bool = False

    def images(self, text: str) -> Domain:
        """Return the images at a path, or of a data set by its name, without looking at any label."""
        if (named := self.named(text)) is not None:
            return named
        try:
            return watched(undrift.images.domain(text, preprocess=self.preprocess))
        except DataError as error:
            if Path(text).exists():
                raise
            raise DataError(f"{error} Data sets by name: {data_sets()}.") from error

    def named(self, text: str) -> Domain | None:
        """Return a data set by its name, or None where the text is a path, or no data set's name.

        ImageNet-C and val5k, which are 224×224 already, are not resized.
        """
        if Path(text).exists() or (found := data_set(text, self.root)) is None:
            return None
        own, crop = found.preprocess, self.preprocess.crop
        whole = own.crop if isinstance(found, FileDomain) and own.resize is None else None
        fits = whole is not None and crop is not None and crop <= whole
        as_it_is = fits and not self.resize_given
        return watched(found.prepared(self.preprocess.without_resize() if as_it_is else self.preprocess))


def watched(domain: Domain) -> Domain:
    """Return the domain, watched where it is read from files."""
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
    """The batches of a domain in its order, from a place on, and where the last one ended.

    Attributes:
        names: of the images in the last batch.
        position: images of the domain that are done with, those that could not be read among them.
        unfinished: images at the end that could not be read, but may be once they are written to their end: a stream
            that goes on begins with them.
    """

    def __init__(
        self, domain: Domain, batch_size: int, position: int, device: "torch.device", goes_on: bool = False
    ) -> None:
        self.domain: Domain = domain.select(range(position, len(domain))) if position else domain
        self.names: list[str] = []
        self.position, self._start, self._size, self._device = position, position, batch_size, device
        self.unfinished: list[str] = []
        self._goes_on, self._begun = goes_on, time.time()

    def __iter__(self) -> "Iterator[torch.Tensor]":
        domain, size, last = self.domain, self._size, -1
        if isinstance(domain, TensorDomain):
            batches = domain._batches(list, size, None, False)
        else:
            # Some image was read before: those that are left may all be broken, as at the end of a whole stream.
            batches = domain._batches(list, size, None, False, "cpu", None, self._start > 0)
        for images, places in batches:
            self.names = [name_of(domain, place) for place in places]
            last = places[-1]
            # Batches begin at multiples of their size, whatever images in them could not be read.
            end = (last // size + 1) * size
            self.position = self._start + (end if end < len(domain) else self._finished(last + 1))
            yield images.to(self._device)
        self.position = self._start + self._finished(max(last + 1, self.position - self._start))

    def __length_hint__(self) -> int:
        return -(-len(self.domain) // self._size)

    def skipped(self) -> dict[str, str]:
        """Return the images that could not be read, each with its reason, but for those that may be yet."""
        return {name: why for name, why in skipped_of(self.domain).items() if name not in self.unfinished}

    def _finished(self, least: int) -> int:
        """Return how many images, `least` or more, are done with: all but the last ones that were just written to."""
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
        # Since it was read, too; but a date far in the future would be left for the next run by every run.
        return self._begun - SETTLED < changed < time.time() + SETTLED


def name_of(domain: Domain, place: int) -> str:
    """Return where the image at this place came from."""
    return domain.name_of(place) if isinstance(domain, TensorDomain) else domain.sources[place].name


def data_set(text: str, root: Path, train: bool = False) -> Domain | None:
    """Return a data set by its name, or None where the text is none's name."""
    found = (extension.data_set(text, root, train) for extension in extensions())
    return next((known for known in found if known is not None), None)


def first_images(domain: Domain, count: int) -> "torch.Tensor":
    """Return the first few images that can be read, as the network wants them; decoded here, without workers."""
    if isinstance(domain, TensorDomain):
        return next(iter(domain.named_batches(count)))[0]
    return next(iter(domain.named_batches(count, workers=0)))[0]


def hold_if_small(domain: Domain, device: "torch.device", most_bytes: int = 2**30) -> Domain:
    """Return the domain in memory where all its images fit into 1 GiB, so that each is decoded once."""
    if isinstance(domain, TensorDomain):
        return domain.to(device)
    return domain.hold(device) if first_images(domain, 1).numel() * len(domain) <= most_bytes else domain
