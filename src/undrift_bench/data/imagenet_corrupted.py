"""ImageNet-C (Hendrycks & Dietterich 2019): CORRUPTION/SEVERITY/SYNSET/IMAGE, 224×224."""

from os import PathLike
from pathlib import Path

from undrift.images.domains import FileDomain
from undrift.images.preprocess import IMAGENET, Preprocess
from undrift_bench.data.cifar_c import check_corruption
from undrift_bench.data.imagenet_val import class_tree
from undrift_bench.data.published_set import first_existing, layout_error

GROUPS = ("noise", "blur", "weather", "digital", "extra")
ORIGIN = "It comes from Zenodo, record 2235448; `undrift corrupt` makes the same from ImageNet's validation images."


def imagenet_c(
    root: str | PathLike[str],
    corruption: str,
    severity: int = 5,
    *,
    preprocess: Preprocess | None = None,
    seed: int | None = 0,
) -> FileDomain:
    """Return ImageNet-C's images of one corruption and severity; the same seed gives every corruption the same order.

    Args:
        root: holds CORRUPTION/SEVERITY/SYNSET/IMAGE, or Zenodo's groups (noise, blur, …) with them.
        severity: 1 to 5.
        preprocess: None takes ImageNet's own without the resizing, as the images are 224×224 already.
        seed: of the order; None leaves the files sorted by class.
    """
    check_corruption(corruption, severity)
    places = [Path(root, group, corruption, str(severity)) for group in ("", *GROUPS)]
    place = first_existing(places)
    if place is None:
        raise layout_error(Path(root), f"{corruption}/{severity}/SYNSET/IMAGE, with all 1000 synsets", ORIGIN)
    name = f"ImageNet-C {corruption} {severity}"
    return class_tree(name, place, ORIGIN, preprocess or IMAGENET.without_resize(), seed)
