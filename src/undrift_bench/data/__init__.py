"""Published data sets in their published layouts; every loader returns a domain of `undrift.images`.

    >>> from undrift import images
    >>> from undrift_bench import data
    >>> photo = data.pacs("pacs", "photo")                             # doctest: +SKIP
    >>> train, held_out = images.split(photo, held_out=0.1)            # doctest: +SKIP
    >>> for batch, labels in train.batches(64, device="cuda"): ...     # doctest: +SKIP

A folder in another layout raises `DataError`: what was found, what the layout is, where the data come from.
"""

from undrift_bench.data.cifar import cifar10, cifar100
from undrift_bench.data.cifar_c import cifar10_c, cifar100_c
from undrift_bench.data.digits_domains import digits
from undrift_bench.data.imagenet_corrupted import imagenet_c
from undrift_bench.data.imagenet_val import imagenet
from undrift_bench.data.office_31 import office31
from undrift_bench.data.officehome import office_home
from undrift_bench.data.pacs_domains import pacs

__all__ = [
    "cifar10",
    "cifar10_c",
    "cifar100",
    "cifar100_c",
    "digits",
    "imagenet",
    "imagenet_c",
    "office31",
    "office_home",
    "pacs",
]
