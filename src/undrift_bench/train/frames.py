"""Keep a whole domain on the device as uint8, and cut batches from it there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from undrift._errors import DataError
from undrift.images import Domain, FileDomain, Preprocess

CHUNK = 512


@dataclass(frozen=True, eq=False)
class Frames:
    """What windows are cut from: resized and padded images, not yet cropped.

    Args:
        images: uint8, N×H×W×C. Channels come last, so that a gathered batch is channels-last already.
        labels: int64, N.
        preprocess: the domain's own; its crop is the window, its normalisation is what the network sees.
        window: height and width of what the network sees.
    """

    images: Tensor
    labels: Tensor
    preprocess: Preprocess
    window: tuple[int, int]

    def __len__(self) -> int:
        return len(self.images)


def frames(domain: Domain, device: torch.device, pad: int = 0, workers: int | None = None) -> Frames:
    """Return a labelled domain's images on `device`, decoded and resized once, with a black border of `pad` pixels."""
    uncropped = replace(domain.preprocess, crop=None)
    if isinstance(domain, FileDomain):
        held = domain.prepared(uncropped).hold(device, workers=workers)
        images, labels = held.images, held.labels
    else:
        chunks = [uncropped.frame(chunk.to(device)) for chunk in domain.images.split(CHUNK)]
        images, labels = torch.cat(chunks), domain.labels
    assert labels is not None, "checked before anything is decoded"
    crop, (height, width) = domain.preprocess.crop, images.shape[2:]
    if crop is not None and min(height, width) < crop:
        raise DataError(
            f"{domain.name} has frames of {height}×{width} pixels; needed: at least {crop}×{crop}, the crop of its "
            "preprocessing. Set `resize`, or leave `crop` out."
        )
    images = F.pad(images, (pad,) * 4).permute(0, 2, 3, 1).contiguous()
    window = (height, width) if crop is None else (crop, crop)
    return Frames(images, labels.to(device), domain.preprocess, window)


@dataclass(frozen=True)
class Views:
    """The random choices of one epoch, drawn at once: which images, where each window lies, whether it is mirrored."""

    order: Tensor
    top: Tensor
    left: Tensor
    flip: Tensor

    def batches(self, size: int) -> Iterator[Views]:
        """Yield full batches; what is left over at the end is left out, as compiled code wants one shape."""
        for at in range(0, len(self.order) - size + 1, size):
            part = slice(at, at + size)
            yield Views(self.order[part], self.top[part], self.left[part], self.flip[part])


def draw(source: Frames, flip: bool, generator: torch.Generator) -> Views:
    """Draw an epoch's views from a CPU generator, so that every device sees the same ones."""
    count, (height, width) = len(source), source.images.shape[1:3]
    choices = (
        torch.randperm(count, generator=generator),
        torch.randint(height - source.window[0] + 1, (count,), generator=generator),
        torch.randint(width - source.window[1] + 1, (count,), generator=generator),
        torch.rand(count, generator=generator) < (0.5 if flip else 0.0),
    )
    return Views(*(choice.to(source.images.device) for choice in choices))


def cut(source: Frames, views: Views) -> Tensor:
    """Return the windows as uint8 N×C×H×W, channels-last in memory: one gather for crop, flip and shuffle."""
    height, width = source.window
    rows = torch.arange(height, device=views.order.device)
    columns = torch.arange(width, device=views.order.device)
    y = views.top[:, None] + rows
    x = views.left[:, None] + torch.where(views.flip[:, None], columns.flip(0), columns)
    return source.images[views.order[:, None, None], y[:, :, None], x[:, None, :]].permute(0, 3, 1, 2)


class Normalise:
    """The preprocessing's normalisation, with its constants on the device: no copy from the host in each step."""

    def __init__(self, preprocess: Preprocess, device: torch.device) -> None:
        ends = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, preprocess.channels, 1, 1)
        black, white = preprocess.normalise(ends).to(device)
        self._black, self._step = black, (white - black) / 255

    def __call__(self, images: Tensor) -> Tensor:
        """Return uint8 images as the network wants them, in float32."""
        return images * self._step + self._black
