"""ImageNet's validation images (Russakovsky et al. 2015): one folder per synset, or a tar of a part."""

from os import PathLike
from pathlib import Path

from undrift._errors import DataError
from undrift.images.domains import FileDomain
from undrift.images.preprocess import IMAGENET, Preprocess
from undrift.images.tree import contents, labelled, read_classes
from undrift_bench.data.published_set import first_existing, layout_error

CLASSES = 1000
LAYOUT = (
    "val/SYNSET/IMAGE (or SYNSET/IMAGE) with all 1000 synsets, as a label is a synset's place among them; or "
    "INDEX/IMAGE with INDEX from 0 to 999, as a tree or as val5k.tar"
)
ORIGIN = "The images come from image-net.org (ILSVRC 2012 validation), to be moved into a folder for each synset."


def imagenet(root: str | PathLike[str], *, preprocess: Preprocess | None = None, seed: int | None = 0) -> FileDomain:
    """Return ImageNet's validation images, or as many of them as there are.

    Args:
        root: a tree of synsets or of class indices, a folder that holds one as `val`, or a tar.
        preprocess: None takes ImageNet's own, without the resizing for a tar, whose images are 224×224 already.
        seed: of the order; None leaves the files sorted by class.
    """
    place = first_existing(
        [Path(root, "val"), Path(root, "val5k.tar"), Path(root, "imagenet", "val5k.tar"), Path(root)]
    )
    if place is None:
        raise layout_error(Path(root), LAYOUT, ORIGIN)
    usual = IMAGENET if place.is_dir() else IMAGENET.without_resize()
    return class_tree("ImageNet", place, ORIGIN, preprocess or usual, seed)


def class_tree(name: str, place: Path, origin: str, preprocess: Preprocess, seed: int | None) -> FileDomain:
    """Return a tree of all synsets or of class indices as a domain of ImageNet's thousand classes."""
    classes = {key: sources for key, sources in read_classes(place).items() if sources}
    if classes and all(key.isdecimal() and str(int(key)) == key and int(key) < CLASSES for key in classes):
        return labelled(name, classes, [str(index) for index in range(CLASSES)], preprocess, seed)
    if len(classes) != CLASSES:
        raise DataError(f"{contents(place)} ({len(classes)} folders with images); needed: {LAYOUT}. {origin}")
    return labelled(name, classes, sorted(classes), preprocess, seed)
