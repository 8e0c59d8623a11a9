"""Open labelled images: a tree or tar with one folder per class, an array with labels, or a data set by name."""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from undrift._errors import DataError
from undrift.cli.extensions import data_sets
from undrift.cli.image_arguments import Reader, watched
from undrift.images import Domain, FileDomain, Preprocess
from undrift.images.labels import read_labels
from undrift.images.tree import contents, labelled, read_classes


def labelled_images(text: str, reader: Reader, classes: tuple[str, ...] | None, labels: Path | None) -> Domain:
    """Return labelled images: a tree or tar with one folder per class, an array with `labels`, or a data set.

    Args:
        classes: the names of the network's classes; without them, a folder named by a number is that output.
    """
    if (named := reader.named(text)) is not None:
        return _matched(named, classes, text)
    if labels is not None:
        return _with_labels(reader.images(text), labels)
    found = watched(tree(text, reader.preprocess))
    return _numbered(found) if classes is None else _matched(found, classes, text)


def tree(text: str, preprocess: Preprocess) -> FileDomain:
    """Return a folder or tar with one folder per class as a domain."""
    place = Path(text)
    if not place.is_dir() and place.suffix != ".tar":
        found = f"{contents(place)}, which has no labels" if place.exists() else f"there is no {place}"
        raise DataError(
            f"{found}; needed: a folder or an uncompressed .tar with one folder per class, an .npy with --labels, or a "
            f"data set by name ({data_sets()}). Check the path."
        )
    found_classes = {name: sources for name, sources in read_classes(place).items() if sources}
    if not found_classes:
        raise DataError(f"{contents(place)}, no folder with images; needed: one folder per class. Check the path.")
    # INDEX/IMAGE is a common layout, so numbers sort as numbers.
    names = sorted(found_classes, key=int if _numbers(found_classes) else str)
    return labelled(place.name, found_classes, names, preprocess, seed=0)


def _with_labels(domain: Domain, path: Path) -> Domain:
    if not path.exists():
        raise DataError(f"there is no {path}; needed: a .npy with one label per image. Check --labels.")
    labels = read_labels(path)
    if len(labels) != len(domain):
        raise DataError(
            f"{path} has {len(labels)} labels, {domain.name} {len(domain)} images; needed: one label per image, in "
            "order. Give the labels of these images."
        )
    return replace(domain, labels=torch.from_numpy(labels.astype(np.int64)))


def _numbered(domain: Domain) -> Domain:
    """Return the domain with folder numbers as labels, if all folders are numbers without leading zeros.

    Some classes may be missing: folders 3 and 7 are outputs 3 and 7, not 0 and 1.
    """
    own = domain.class_names
    if not _numbers(own) or any(str(int(name)) != name for name in own):
        return domain
    return _relabelled(domain, [int(name) for name in own], ())


def _matched(domain: Domain, classes: tuple[str, ...] | None, text: str) -> Domain:
    """Return the domain with labels in the order of the network's classes, matched by name."""
    own = domain.class_names
    if classes is None or own == classes or not own:
        return domain
    spelt = str if set(own) <= set(classes) or not _numbers((*own, *classes)) else int  # 07 is 7
    places = {spelt(name): place for place, name in enumerate(classes)}
    missing = [name for name in own if spelt(name) not in places]
    if missing:
        shown = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        raise DataError(
            f"{text} has classes that the network does not ({shown}; {len(own)} against {len(classes)}: "
            f"{', '.join(classes[:3])}, …); needed: the network's class names. Rename the folders, or give the names "
            "with --classes."
        )
    return _relabelled(domain, [places[spelt(name)] for name in own], classes)


def _relabelled(domain: Domain, labels: list[int], class_names: tuple[str, ...]) -> Domain:
    """Return the domain with `labels[i]` in place of label i."""
    assert domain.labels is not None
    new = torch.tensor(labels)[domain.labels.cpu()]
    return replace(domain, labels=new.to(domain.labels.device), class_names=class_names)


def _numbers(names: Iterable[str]) -> bool:
    return all(re.fullmatch(r"[0-9]{1,18}", name) for name in names)  # 18 digits: what an int64 holds


def check_label_range(domain: Domain, outputs: int) -> None:
    """Raise if a label is not an output of the network, or if fewer folders than outputs leave the order open."""
    assert domain.labels is not None
    low, high = int(domain.labels.min()), int(domain.labels.max())
    if low < 0 or high >= outputs or 0 < len(domain.class_names) < outputs:
        names = f", {len(domain.class_names)} classes" if domain.class_names else ""
        remedy = "Take the network that was trained on these classes, or name its classes with --classes."
        if low > 0 and high == outputs:
            remedy = (
                f"They seem to count from 1: name the classes of folders 1 to {outputs} with --classes, or subtract 1."
            )
        raise DataError(
            f"{domain.name} has labels from {low} to {high}{names}; the network has {outputs} outputs; needed: labels "
            f"from 0 to {outputs - 1}, one per output. {remedy}"
        )
