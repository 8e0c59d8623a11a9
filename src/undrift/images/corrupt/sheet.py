"""Draw a contact sheet: one image under every corruption at every severity."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from undrift._errors import DataError
from undrift.images.corrupt.apply import corrupt
from undrift.images.corrupt.constants import SEVERITIES
from undrift.images.corrupt.files import whole_file
from undrift.images.sources import pillow

if TYPE_CHECKING:
    from PIL.Image import Image

BLOCKS = (
    (
        ("gaussian_noise", "shot_noise", "impulse_noise"),
        ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    ),
    (
        ("snow", "frost", "fog", "brightness"),
        ("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
    ),
)
"""Noise and blur beside weather and digital."""

_CELL, _GAP, _LABEL, _HEAD, _MARGIN = 96, 5, 106, 26, 18
_STEP, _BREAK = _CELL + _GAP, 9
_INK, _FAINT = (28, 32, 38), (112, 120, 130)


def contact_sheet(
    image: Tensor, path: str | PathLike[str], *, seed: int = 0, frost: str | PathLike[str] | None = None
) -> Path:
    """Draw the image under the fifteen corruptions × five severities to a PNG (256 colours), and return its path.

    Args:
        image: 3×H×W, uint8 or floating point in [0, 1]; the constants follow its size.
        seed: as for `corrupt`.
        frost: as for `corrupt`.
    """
    if image.ndim != 3:
        raise DataError(f"the image has shape {tuple(image.shape)}; needed: one, 3×H×W. Pick one with images[0].")
    pil: Any = pillow()
    from PIL import ImageDraw, ImageFont

    block_width = _LABEL + len(SEVERITIES) * _STEP + _GAP
    size = (2 * _MARGIN + 2 * block_width, 2 * _MARGIN + _HEAD + 8 * _STEP + _BREAK)
    sheet = pil.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    font, small = ImageFont.load_default(15), ImageFont.load_default(12)

    def draw_row(left: int, top: int, name: str, cells: Sequence[Tensor]) -> None:
        words = name.replace("_", "\n")
        draw.text((left + _LABEL - 10, top + _CELL // 2), words, _INK, font, anchor="rm", align="right")
        for place, cell in enumerate(cells):
            sheet.paste(_thumbnail(cell), (left + _LABEL + place * _STEP, top))

    for column, groups in enumerate(BLOCKS):
        left, top = _MARGIN + column * block_width, _MARGIN + _HEAD
        for severity in SEVERITIES:
            middle = left + _LABEL + (severity - 1) * _STEP + _CELL // 2
            draw.text((middle, _MARGIN + 10), f"severity {severity}", _FAINT, small, anchor="mm")
        if column == 0:  # seven corruptions beside eight: room for the image itself
            draw_row(left, top, "original", [image])
            about = f"{image.shape[2]} x {image.shape[1]} pixels, seed {seed}"
            draw.text((left + _LABEL + _STEP + 10, top + _CELL // 2), about, _FAINT, small, anchor="lm")
            top += _STEP
        for group in groups:
            for name in group:
                cells = [corrupt(image[None], name, severity, seed, frost=frost)[0] for severity in SEVERITIES]
                draw_row(left, top, name, cells)
                top += _STEP
            top += _BREAK
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(target) as file:
        sheet.quantize(256, dither=pil.Dither.FLOYDSTEINBERG).save(file, "PNG", optimize=True)
    return target


def _thumbnail(image: Tensor) -> Image:
    """Return the image as a cell: small ones enlarged pixel by pixel, large ones shrunk smoothly."""
    levels = image if image.dtype == torch.uint8 else (image.float() * 255).round().to(torch.uint8)
    pil: Any = pillow()
    picture = pil.fromarray(np.ascontiguousarray(levels.permute(1, 2, 0).cpu().numpy()))
    method = pil.Resampling.NEAREST if max(picture.size) < _CELL else pil.Resampling.LANCZOS
    thumbnail: Image = picture.resize((_CELL, _CELL), method)
    return thumbnail
