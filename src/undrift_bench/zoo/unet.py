"""A small U-Net: a class per pixel, batch norm behind every convolution (Ronneberger et al. 2015)."""

from itertools import pairwise

import torch
from torch import Tensor, nn


def _block(inputs: int, outputs: int) -> nn.Sequential:
    layers = [
        part
        for channels in (inputs, outputs)
        for part in (nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())
    ]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Blocks of two convolutions on the way down and up, joined by what each level saw on its way down.

    Args:
        classes: outputs per pixel.
        widths: channels of each level, from the images' own size to the smallest.
    """

    def __init__(self, classes: int, widths: tuple[int, ...] = (24, 48, 96)) -> None:
        super().__init__()
        self.down = nn.ModuleList([_block(i, o) for i, o in zip((3, *widths), widths, strict=False)])
        above = list(reversed(widths))
        self.grow = nn.ModuleList([nn.ConvTranspose2d(i, o, 2, 2) for i, o in pairwise(above)])
        self.up = nn.ModuleList([_block(2 * o, o) for o in above[1:]])
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits, batch × classes × height × width; sides are multiples of what the levels halve."""
        seen = []
        x = images
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else nn.functional.max_pool2d(x, 2))
            seen.append(x)
        for grow, block, beside in zip(self.grow, self.up, reversed(seen[:-1]), strict=True):
            x = block(torch.cat([grow(x), beside], 1))
        out: Tensor = self.head(x)
        return out
