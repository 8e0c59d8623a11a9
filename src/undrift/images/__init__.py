"""Open the user's own images and bring them to a network.

`domain` opens a folder, a tar, a list of files or an array. A `FileDomain` stays on disk and is decoded in worker
processes; a `TensorDomain` lives in memory or on a GPU; `hold` makes the second from the first.

    >>> from undrift import images
    >>> clinic = images.domain("clinic-b", preprocess=images.IMAGENET)  # doctest: +SKIP
    >>> for batch, names in clinic.named_batches(64): ...               # doctest: +SKIP
    >>> resident = clinic.hold("cuda")                                  # doctest: +SKIP

Images that cannot be read are skipped, counted, and named in `skipped` of the batches or of the held domain. A folder
without images raises `DataError`. Nothing is downloaded, extracted or unpickled.
"""

from undrift.images.batches import Batches, Skipped
from undrift.images.domains import Domain, FileDomain, TensorDomain, shuffle, split
from undrift.images.open_domain import domain
from undrift.images.preprocess import IMAGENET, SHOT, Preprocess

__all__ = [
    "IMAGENET",
    "SHOT",
    "Batches",
    "Domain",
    "FileDomain",
    "Preprocess",
    "Skipped",
    "TensorDomain",
    "domain",
    "shuffle",
    "split",
]
