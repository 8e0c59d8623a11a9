"""The fifteen corruptions of CIFAR-C and ImageNet-C, and three more for development, at five severities.

    >>> import torch
    >>> from undrift.images.corrupt import corrupt
    >>> images = torch.zeros(8, 3, 32, 32, dtype=torch.uint8)
    >>> noisy = corrupt(images, "gaussian_noise", severity=3)

`write_cifar_c` and `write_imagenet_c` write whole data sets in their published layouts; `contact_sheet` draws one image
under all of them. Constants, seeding and deviations: docs/explanation/corruptions.md.
"""

from undrift.images.corrupt.apply import corrupt
from undrift.images.corrupt.constants import CORRUPTIONS, DEVELOPMENT, SEVERITIES
from undrift.images.corrupt.files import Written
from undrift.images.corrupt.sheet import contact_sheet
from undrift.images.corrupt.write import write_cifar_c, write_imagenet_c

__all__ = [
    "CORRUPTIONS",
    "DEVELOPMENT",
    "SEVERITIES",
    "Written",
    "contact_sheet",
    "corrupt",
    "write_cifar_c",
    "write_imagenet_c",
]
