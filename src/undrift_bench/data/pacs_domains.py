"""PACS (Li et al. 2017): seven kinds of things as photos, art paintings, cartoons and sketches."""

from os import PathLike

from undrift.images.domains import FileDomain
from undrift.images.preprocess import SHOT, Preprocess
from undrift_bench.data.published_set import PublishedSet

PACS = PublishedSet(
    title="PACS",
    domains={
        "art_painting": (("art_painting",), 2048),
        "cartoon": (("cartoon",), 2344),
        "photo": (("photo",), 1670),
        "sketch": (("sketch",), 3929),
    },
    class_names=("dog", "elephant", "giraffe", "guitar", "horse", "house", "person"),
    origin="It comes from the authors' page of PACS (Li et al. 2017): unpack it as it is.",
    inside=("PACS", "pacs", "kfold", "pacs_data"),
)


def pacs(root: str | PathLike[str], domain: str, *, preprocess: Preprocess = SHOT, seed: int | None = 0) -> FileDomain:
    """Return a domain of PACS: "art_painting", "cartoon", "photo" or "sketch".

    Args:
        root: holds DOMAIN/CLASS/IMAGE or DOMAIN.tar.
        seed: of the order; None leaves the files sorted by class.
    """
    return PACS.load(root, domain, preprocess, seed)
