"""Whether a collate function leaves each sample at its place in the batch.

Nobody says so, and nothing shows it afterwards: a label that is kept for a place goes to another image. So the function
is asked again about the same samples, the first time in another order.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from undrift._batches import images_of
from undrift._repeat import Repeated


class Doubt(NamedTuple):
    """What speaks against the places of a batch.

    Attributes:
        found: what was found, a part of a sentence that begins with "its collate_fn".
        lost: whether the places are known to be wrong; else nobody knows.
    """

    found: str
    lost: bool


def doubt(again: Repeated, images: Tensor, drew: bool) -> Doubt | None:
    """Return what speaks against row i of a batch being its sample i; None where it is shown to be.

    A function that draws nothing is asked once more: samples in another order have to give the rows in that order. One
    that draws numbers (augmentation) gives its i-th draw to whatever lies there; of such a row it is shown that no
    other sample has any part in it.

    Args:
        images: what it made of the samples.
        drew: whether it drew numbers for that.
    """
    try:
        return _doubt(again, images, drew)
    except Exception as error:  # whatever it raises, the batch itself was made
        return Doubt(f"made a batch once and raised {type(error).__name__} ({error}) when asked again", lost=False)


def _doubt(again: Repeated, images: Tensor, drew: bool) -> Doubt | None:
    count = len(images)
    # All but the last go one on. A fixed order of its own (reversed, say) would have to fit this one by chance.
    other = [*range(count)] if count < 2 else [1, 0] if count == 2 else [count - 2, *range(count - 2), count - 1]
    if _alike(images_of(again(other)), images[other]):
        return None
    if not _alike(images_of(again(range(count))), images):
        return Doubt("makes another batch of the same samples each time", lost=False)
    if not drew:
        return Doubt("reorders or mixes the samples of a batch", lost=True)
    for bit in range((count - 1).bit_length()):
        for value in (0, 1):
            # Of any two samples one is exchanged here and the other is not, for some bit and value.
            stay = [at for at in range(count) if at >> bit & 1 == value]
            order = [at if at >> bit & 1 == value else (at + 1) % count for at in range(count)]
            made = images_of(again(order))
            if made.shape != images.shape:
                return Doubt("makes batches whose shape depends on the order of the samples", lost=False)
            if not _alike(made[stay], images[stay]):
                return Doubt("draws numbers and reorders or mixes the samples of a batch", lost=True)
    return None


def _alike(one: Tensor, other: Tensor) -> bool:
    """Return whether two batches hold the same images, up to the rounding of statistics over a batch."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if torch.equal(one, other):
        return True
    scale = float(other.abs().amax().nan_to_num(0.0, 0.0, 0.0)) if other.numel() else 0.0
    return torch.allclose(one, other, rtol=1e-5, atol=1e-6 * scale, equal_nan=True)
