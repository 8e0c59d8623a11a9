"""Office-31 (Saenko et al. 2010): 31 things of an office, photographed three ways."""

from os import PathLike

from undrift.images.domains import FileDomain
from undrift.images.preprocess import SHOT, Preprocess
from undrift_bench.data.published_set import PublishedSet

_CLASSES = """
back_pack bike bike_helmet bookcase bottle calculator desk_chair desk_lamp desktop_computer
file_cabinet headphones keyboard laptop_computer letter_tray mobile_phone monitor mouse mug
paper_notebook pen phone printer projector punchers ring_binder ruler scissors speaker stapler
tape_dispenser trash_can
"""
CLASSES = tuple(_CLASSES.split())

OFFICE_31 = PublishedSet(
    title="Office-31",
    domains={"amazon": (("amazon",), 2817), "dslr": (("dslr",), 498), "webcam": (("webcam",), 795)},
    class_names=CLASSES,
    origin="It comes from the authors' page of domain adaptation data (Saenko et al. 2010): unpack it as it is.",
    inside=("domain_adaptation_images", "Original_images", "office31", "office"),
    below="images",
)


def office31(
    root: str | PathLike[str], domain: str, *, preprocess: Preprocess = SHOT, seed: int | None = 0
) -> FileDomain:
    """Return a domain of Office-31: "amazon", "dslr" or "webcam".

    Args:
        root: holds DOMAIN/images/CLASS/IMAGE, DOMAIN/CLASS/IMAGE or DOMAIN.tar.
        seed: of the order; None leaves the files sorted by class.
    """
    return OFFICE_31.load(root, domain, preprocess, seed)
