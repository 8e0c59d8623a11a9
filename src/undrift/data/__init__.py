"""Benchmarks in their published layouts, the user's own images, and how both reach a network.

Every loader returns a domain: images of one kind with their labels and class names. A `FileDomain` stays on disk and
is decoded in worker processes; a `TensorDomain` lives in memory or on a GPU; `hold` makes the second from the first.

    >>> from undrift import data, zoo
    >>> photo = data.pacs("pacs", "photo")                                       # doctest: +SKIP
    >>> train, held_out = data.split(photo, held_out=0.1)                        # doctest: +SKIP
    >>> for images, labels in train.batches(64, device="cuda"): ...              # doctest: +SKIP
    >>> resident = held_out.hold("cuda")                                         # doctest: +SKIP
    >>> clinic = data.images("clinic-b", preprocess=zoo.preprocess("resnet50"))  # doctest: +SKIP
    >>> for images, names in clinic.named_batches(64): ...                       # doctest: +SKIP

Images that cannot be read are skipped, counted and named in `skipped` of the batches or of the held domain. A folder
that is not what it should be raises `DataError`: what was found, what the layout is, where the data come from. Nothing
is downloaded, extracted or unpickled. `undrift.data.corrupt` makes corrupted images from clean ones.
"""

from ._batches import Batches, Skipped
from ._cifar import cifar10, cifar100
from ._cifar_c import cifar10_c, cifar100_c
from ._digits import digits
from ._domain import Domain, FileDomain, TensorDomain, shuffle, split
from ._imagenet import imagenet
from ._imagenet_c import imagenet_c
from ._images import images
from ._office31 import office31
from ._office_home import office_home
from ._pacs import pacs
from .preprocess import IMAGENET, SHOT, Preprocess

__all__ = [
    "IMAGENET",
    "SHOT",
    "Batches",
    "Domain",
    "FileDomain",
    "Preprocess",
    "Skipped",
    "TensorDomain",
    "cifar10",
    "cifar10_c",
    "cifar100",
    "cifar100_c",
    "digits",
    "imagenet",
    "imagenet_c",
    "images",
    "office31",
    "office_home",
    "pacs",
    "shuffle",
    "split",
]
