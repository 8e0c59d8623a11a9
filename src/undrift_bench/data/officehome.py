"""Office-Home (Venkateswara et al. 2017): 65 everyday things in four styles."""

from os import PathLike

from undrift.images.domains import FileDomain
from undrift.images.preprocess import SHOT, Preprocess
from undrift_bench.data.published_set import PublishedSet

_CLASSES = """
Alarm_Clock Backpack Batteries Bed Bike Bottle Bucket Calculator Calendar Candles Chair Clipboards
Computer Couch Curtains Desk_Lamp Drill Eraser Exit_Sign Fan File_Cabinet Flipflops Flowers Folder
Fork Glasses Hammer Helmet Kettle Keyboard Knives Lamp_Shade Laptop Marker Monitor Mop Mouse Mug
Notebook Oven Pan Paper_Clip Pen Pencil Postit_Notes Printer Push_Pin Radio Refrigerator Ruler
Scissors Screwdriver Shelf Sink Sneakers Soda Speaker Spoon TV Table Telephone ToothBrush Toys
Trash_Can Webcam
"""
CLASSES = tuple(_CLASSES.split())

OFFICE_HOME = PublishedSet(
    title="Office-Home",
    domains={
        "art": (("Art",), 2427),
        "clipart": (("Clipart",), 4365),
        "product": (("Product",), 4439),
        "real_world": (("Real World", "Real_World", "RealWorld"), 4357),
    },
    class_names=CLASSES,
    origin="It comes from the authors' page of Office-Home (Venkateswara et al. 2017): unpack it as it is.",
    inside=("OfficeHomeDataset_10072016", "OfficeHome", "office_home"),
)


def office_home(
    root: str | PathLike[str], domain: str, *, preprocess: Preprocess = SHOT, seed: int | None = 0
) -> FileDomain:
    """Return a domain of Office-Home: "art", "clipart", "product" or "real_world".

    Args:
        root: holds Art/CLASS/IMAGE, …, `Real World`/CLASS/IMAGE, or Art.tar, ….
        seed: of the order; None leaves the files sorted by class.
    """
    return OFFICE_HOME.load(root, domain, preprocess, seed)
