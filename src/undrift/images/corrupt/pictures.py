"""Load the frost pictures, the only data that the corruptions need."""

from __future__ import annotations

import importlib.metadata
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from undrift._errors import DataError
from undrift.images.sources import pillow

FROST_FILES = ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg")
"""The set has a sixth picture, and the published crops never come from it."""


def frost_pictures(folder: Path | None, thinning: int, height: int, width: int) -> tuple[Tensor, ...]:
    """Return the five pictures in [0, 1], (3, h, w) each, with room to crop height × width out of them.

    Args:
        folder: where the pictures lie; None: in the installed `imagecorruptions` wheel.
        thinning: step between the pixels to keep, along each side.
    """
    return _read(_wheel_folder() if folder is None else folder, thinning, height, width)


def _wheel_folder() -> Path:
    need = f"needed: the wheel `imagecorruptions`, which holds {FROST_FILES[0]} … {FROST_FILES[-1]}"
    todo = "Install it with `pip install 'undrift[frost]'`, or name a folder that holds them (frost=…)."
    try:
        # The wheel's data only: importing it would pull in OpenCV and scikit-image
        files = importlib.metadata.files("imagecorruptions") or []
    except importlib.metadata.PackageNotFoundError as error:
        raise DataError(f"there are no frost pictures here; {need}. {todo}") from error
    for file in files:
        if file.name == FROST_FILES[0]:
            return Path(str(file.locate())).parent
    raise DataError(f"the installed `imagecorruptions` has no frost pictures; {need}, as version 1.1.2 does. {todo}")


@lru_cache(maxsize=4)
def _read(folder: Path, thinning: int, height: int, width: int) -> tuple[Tensor, ...]:
    image = pillow()
    pictures = []
    for name in FROST_FILES:
        if not (folder / name).is_file():
            raise DataError(
                f"{folder} has no {name}; needed: a folder with {', '.join(FROST_FILES)}. They come with the wheel "
                "`imagecorruptions`: `pip install 'undrift[frost]'`."
            )
        with image.open(folder / name) as file:
            picture = file.convert("RGB")
        # Linear resizing to a fifth reads the middle one of five pixels; the published files do not average either
        picture = image.fromarray(np.asarray(picture)[thinning // 2 :: thinning, thinning // 2 :: thinning])
        enlarge = max((width + 1) / picture.width, (height + 1) / picture.height)
        if enlarge > 1:
            size = (int(np.ceil(picture.width * enlarge)), int(np.ceil(picture.height * enlarge)))
            picture = picture.resize(size, image.Resampling.BILINEAR)
        pictures.append(torch.from_numpy(np.array(picture)).permute(2, 0, 1).float().div_(255))
    return tuple(pictures)
