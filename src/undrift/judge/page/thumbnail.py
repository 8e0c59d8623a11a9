"""Turn preprocessed images into small pictures for an HTML page."""

import base64
import struct
import zlib
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from undrift.images.preprocess import Preprocess

SIDE = 96
"""Longest side of a thumbnail; smaller images stay as they are."""


def can_be_shown(images: Tensor) -> bool:
    """Return whether a batch is pictures: images × channels × height × width, of real numbers."""
    return images.ndim == 4 and 0 not in images.shape and not images.is_complex()


@torch.no_grad()
def thumbnail(image: Tensor, preprocess: "Preprocess | None" = None) -> Tensor:
    """Return an image as uint8, height × width × 3, at most `SIDE` long.

    Args:
        image: channels × height × width, after preprocessing.
        preprocess: what was done to it. Without it, values outside [0, 1] are stretched to that range.
    """
    pixels = image.detach().cpu()
    pixels = pixels.float() / 255 if pixels.dtype == torch.uint8 else pixels.float()
    if preprocess is not None and len(preprocess.mean) in (1, len(pixels)):
        pixels = pixels * torch.tensor(preprocess.std).view(-1, 1, 1) + torch.tensor(preprocess.mean).view(-1, 1, 1)
    pixels = pixels.nan_to_num(0.0, 0.0, 0.0)
    if preprocess is None and (float(pixels.min()) < 0 or float(pixels.max()) > 1):
        least, most = pixels.min(), pixels.max()
        pixels = (pixels - least) / (most - least).clamp_min(1e-12)
    if len(pixels) != 3:
        pixels = pixels.mean(0, keepdim=True).expand(3, -1, -1)
    longest = max(pixels.shape[1:])
    if longest > SIDE:
        size = [max(1, round(side * SIDE / longest)) for side in pixels.shape[1:]]
        pixels = F.interpolate(pixels[None], size, mode="bilinear", antialias=True)[0]
    return (pixels.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).contiguous()


def png(pixels: Tensor) -> bytes:
    """Return uint8 pixels, height × width × 3, as a PNG file."""
    height, width, _ = pixels.shape
    rows = torch.cat([pixels.new_zeros(height, 1), pixels.reshape(height, width * 3)], 1)  # filter 0 before each row
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.numpy().tobytes(), 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, content) for name, content in parts)


def data_uri(pixels: Tensor) -> str:
    """Return pixels as the source of an <img>, the picture inside."""
    return "data:image/png;base64," + base64.b64encode(png(pixels)).decode()


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
