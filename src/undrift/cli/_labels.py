"""Images with labels: a tree or tar with one folder a class, an array beside its labels, or a data set by name."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from undrift._errors import DataError
from undrift.cli._images import DATA_SETS, data_set, open_images, watched
from undrift.data import Domain, FileDomain, Preprocess
from undrift.data._cifar import read_labels
from undrift.data._tree import contents, labelled, read_classes


def labelled_images(
    text: str, root: Path, preprocess: Preprocess, classes: tuple[str, ...] | None, labels: Path | None
) -> Domain:
    """Return images with labels: a tree or tar with one folder a class, an array with `labels`, or a data set."""
    if not Path(text).exists() and (named := data_set(text, root)) is not None:
        return _matched(watched(named.prepared(preprocess)), classes, text)
    if labels is not None:
        return _with_labels(open_images(text, root, preprocess), labels)
    return _matched(watched(tree(text, preprocess)), classes, text)


def tree(text: str, preprocess: Preprocess) -> FileDomain:
    """Return a folder or tar with one folder a class as a domain."""
    place = Path(text)
    if not place.is_dir() and place.suffix != ".tar":
        found = f"{contents(place)}, which has no labels" if place.exists() else f"there is no {place}"
        raise DataError(
            f"{found}; needed: a folder or an uncompressed .tar with one folder a class, an .npy with --labels, or a "
            f"data set by name ({DATA_SETS}). Check the path."
        )
    found_classes = {name: sources for name, sources in read_classes(place).items() if sources}
    if not found_classes:
        raise DataError(f"{contents(place)}, no folder with images; needed: one folder a class. Check the path.")
    # Numbers sort as numbers: INDEX/IMAGE is a common layout.
    names = sorted(found_classes, key=int if all(n.isdecimal() for n in found_classes) else str)
    return labelled(place.name, found_classes, names, preprocess, seed=0)


def _with_labels(domain: Domain, path: Path) -> Domain:
    if not path.exists():
        raise DataError(f"there is no {path}; needed: a .npy of labels, one an image. Check --labels.")
    labels = read_labels(path)
    if len(labels) != len(domain):
        raise DataError(
            f"{path} has {len(labels)} labels, {domain.name} {len(domain)} images; needed: a label an image, in their "
            "order. Give the labels that belong to these images."
        )
    return replace(domain, labels=torch.from_numpy(labels.astype(np.int64)))


def _matched(domain: Domain, classes: tuple[str, ...] | None, text: str) -> Domain:
    """Return the domain with its labels in the order of the network's classes, matched by name."""
    own = domain.class_names
    if classes is None or own == classes or not own:
        return domain
    missing = [name for name in own if name not in classes]
    if missing:
        if len(own) == len(classes) and all(n.isdecimal() for n in (*own, *classes)):
            return domain
        shown = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        raise DataError(
            f"{text} has classes that the network does not ({shown}; {len(own)} against {len(classes)}: "
            f"{', '.join(classes[:3])}, …); needed: the network's classes, by name. Rename the folders, or name the "
            "network's classes with --classes."
        )
    place = torch.tensor([classes.index(name) for name in own])
    assert domain.labels is not None
    return replace(domain, labels=place[domain.labels.cpu()].to(domain.labels.device), class_names=classes)


def check_label_range(domain: Domain, outputs: int) -> None:
    """Raise where a label is none of the network's outputs, or where fewer folders than outputs could mean any."""
    assert domain.labels is not None
    low, high = int(domain.labels.min()), int(domain.labels.max())
    if low < 0 or high >= outputs or (0 < len(domain.class_names) < outputs and not _numbered(domain)):
        names = f", {len(domain.class_names)} classes" if domain.class_names else ""
        raise DataError(
            f"{domain.name} has labels from {low} to {high}{names}; the network has {outputs} outputs; needed: a label "
            "an output. Take the network that belongs to these classes, or name its classes with --classes."
        )


def _numbered(domain: Domain) -> bool:
    return all(name.isdecimal() for name in domain.class_names)
