"""Predict large images tile by tile, with the memory of one tile."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from undrift._errors import OptionError
from undrift.answer.forward import finite_rows
from undrift.answer.prediction import Prediction

OVERLAP = 4  # a tile shares a quarter of its side with the next one


def check_tile(tile: int | None) -> None:
    """Raise unless the side of a tile is a whole number of pixels."""
    if tile is not None and (isinstance(tile, bool) or not isinstance(tile, int) or tile < OVERLAP):
        raise OptionError(
            f"tile={tile!r} is not a whole number from {OVERLAP} up; needed: the side of a tile in pixels, a multiple "
            "of what the network halves (512 serves most). Leave it out to look at whole images."
        )


def over_tiles(ask: Callable[[Tensor], Prediction], tile: int, images: Tensor) -> Prediction:
    """Return the prediction of each pixel, the mean over the tiles that contain it.

    Only one tile of each image is on the network's device at a time; the answer is where the images are.
    """
    finite = finite_rows(images)
    sound = None if bool(finite.all()) else finite
    kept = images if sound is None else images[sound]
    probs = inner = None
    times = images.new_zeros(images.shape[-2:])
    for rows, columns in _windows(kept, tile):
        p = ask(kept[..., rows, columns])
        if p.probs.ndim != 4:
            raise OptionError(
                f"tile={tile} was given, and the network answers whole images (probabilities of shape "
                f"{tuple(p.probs.shape)}); needed: an answer per pixel. Leave tile out."
            )
        if probs is None or inner is None:
            probs = images.new_zeros(len(kept), p.probs.shape[1], *images.shape[-2:], dtype=p.probs.dtype)
            inner = probs.new_zeros(len(kept), *images.shape[-2:])
        probs[..., rows, columns] += p.probs.to(probs)
        inner[..., rows, columns] += (p.entropy - p.mutual_info).to(probs)
        times[rows, columns] += 1
    if probs is None or inner is None:
        return ask(images)
    return Prediction.of(probs / times, inner / times, sound)


def _windows(images: Tensor, tile: int) -> Iterator[tuple[slice, slice]]:
    if len(images):
        for top in _starts(images.shape[-2], tile):
            for left in _starts(images.shape[-1], tile):
                yield slice(top, top + tile), slice(left, left + tile)


def _starts(length: int, tile: int) -> list[int]:
    """Return where tiles start: they overlap by a quarter at least, and the last ends with the image.

    Examples:
        >>> _starts(10, 4), _starts(3, 4)
        ([0, 3, 6], [0])
    """
    if length <= tile:
        return [0]
    count = 1 + -(-(length - tile) // (tile - tile // OVERLAP))
    return torch.linspace(0, length - tile, count).round().long().tolist()
