"""Collect mean and variance of some input channels of a network's norm layers, image by image."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from undrift.posterior.norm import KINDS
from undrift.posterior.select import plain_name

CHANNELS = 32
"""How many channels of each layer are used, evenly spaced; all of them tell no more."""


def used_channels(channels: int) -> list[int]:
    """Return the channels of a layer that are used, evenly spaced."""
    count = min(channels, CHANNELS)
    return [number * channels // count for number in range(count)]


@dataclass(frozen=True)
class ImageMoments:
    """Moments of a batch, image by image, at the inputs of some norm layers.

    Attributes:
        layers: the layers, in the order of the pass, and how many channels of each were used.
        mean: over the positions of an image: images × all layers' channels.
        var: the same; NaN where a channel has one position only.
    """

    layers: Mapping[str, int]
    mean: Tensor
    var: Tensor

    def __len__(self) -> int:
        return len(self.mean)


@dataclass
class Watch:
    """Records the inputs of the norm layers in one pass; `moments` reads them."""

    images: int = 0
    found: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def moments(self) -> ImageMoments | None:
        """Return the moments of the last pass; None where no norm layer took part in it."""
        found, self.found = self.found, {}
        if not found:
            return None
        rows = [torch.cat(parts, 1) for parts in zip(*found.values(), strict=True)]
        return ImageMoments({name: mean.shape[1] for name, (mean, _) in found.items()}, *rows)


@contextmanager
def watching(net: nn.Module) -> Iterator[Watch]:
    """Record the inputs of a network's norm layers, pass by pass, for the length of a `with` block."""
    watch, handles = Watch(), []

    def begin(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        watch.images, watch.found = 0 if given is None else len(given), {}

    def look(name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name not in watch.found:  # a layer that is used twice shows its first input
            moments = channel_moments(layer, args[0] if args else kwargs["input"], watch.images)
            if moments is not None:
                watch.found[name] = moments

    try:
        handles.append(net.register_forward_pre_hook(begin, with_kwargs=True))
        for path, layer in net.named_modules():
            if isinstance(layer, KINDS):
                name = plain_name(path)

                def hook(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                    look(name, module, args, kwargs)

                handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
        yield watch
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def channel_moments(layer: nn.Module, x: Tensor, images: int) -> tuple[Tensor, Tensor] | None:
    """Return mean and variance over the positions of each image, images × channels, in float32.

    None where the layer's input cannot be told apart by image or by channel.
    """
    channels = channels_of(layer)
    axis = next((a for a in (_usual_axis(layer, x), 1) if 0 < a < x.ndim and x.shape[a] == channels), None)
    if axis is None or images == 0 or x.shape[0] % images or not x.is_floating_point():
        return None
    # Windows of an image are rows of the batch in some transformers, image after image.
    few = torch.tensor(used_channels(channels), device=x.device)
    x = x.detach().index_select(axis, few).movedim(axis, -1).reshape(images, -1, len(few))
    if x.dtype in (torch.float16, torch.bfloat16):
        x = x.float()
    var, mean = torch.var_mean(x, dim=1, correction=0)
    return mean.float(), var.float() if x.shape[1] > 1 else var.float().fill_(torch.nan)


def channels_of(layer: Any) -> int:
    """Return how many channels a norm layer has."""
    for name in ("num_features", "num_channels"):
        if hasattr(layer, name):
            return int(getattr(layer, name))
    return int(layer.normalized_shape[0])


def _usual_axis(layer: nn.Module, x: Tensor) -> int:
    if isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        return x.ndim - len(layer.normalized_shape)
    return 1
