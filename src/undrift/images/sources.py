"""Locations of single images: a file, a member of a tar, a row of a .npy; small values for worker processes."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from types import ModuleType
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from undrift._errors import DataError
from undrift.images.preprocess import Preprocess

Images = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]

ENDINGS = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
"""Endings of the files that count as images, in lower case; all others are passed over."""

UNREADABLE = (
    DataError,  # ours: smaller than the crop, more than 8 bits a channel
    OSError,  # missing, truncated, unknown: most of Pillow's errors
    *(SyntaxError, ValueError, TypeError, KeyError, IndexError, EOFError, OverflowError, MemoryError),  # broken headers
    *(struct.error, zlib.error, Warning),  # a Warning for images so large that Pillow suspects a decompression bomb
)
"""What decoding a broken image is known to raise."""

BROKEN_ARRAY = (OSError, EOFError, ValueError, SyntaxError, TokenError, TypeError, KeyError, OverflowError, MemoryError)
"""What `numpy.load` is known to raise, most of it from the header's text."""


class Source(Protocol):
    """One image that can be read on demand."""

    @property
    def name(self) -> str:
        """Where it is stored, for people to read."""
        ...

    def read(self, preprocess: Preprocess) -> Tensor:
        """Return it framed, uint8 C×H×W; raises one of `UNREADABLE` if it is broken."""
        ...


@dataclass(frozen=True)
class FileSource:
    """An image file."""

    path: str

    @property
    def name(self) -> str:
        """The file's path."""
        return self.path

    def read(self, preprocess: Preprocess) -> Tensor:
        """Return the file's image."""
        path = Path(self.path)
        if not path.is_file() and path.exists():  # opening a pipe would wait for ever
            raise DataError("not a regular file")
        return decode(path.read_bytes(), preprocess)


@dataclass(frozen=True)
class TarSource:
    """An image inside an uncompressed tar: read in place, never extracted."""

    tar: str
    member: str
    offset: int
    size: int

    @property
    def name(self) -> str:
        """The tar's path and the member's."""
        return f"{self.tar}/{self.member}"

    def read(self, preprocess: Preprocess) -> Tensor:
        """Return the member's image."""
        with Path(self.tar).open("rb") as file:
            file.seek(self.offset)
            return decode(file.read(self.size), preprocess)


@dataclass(frozen=True)
class LostSource:
    """An image that a tar names but does not hold; it counts as broken."""

    tar: str
    member: str
    reason: str

    @property
    def name(self) -> str:
        """The tar's path and the member's."""
        return f"{self.tar}/{self.member}"

    def read(self, preprocess: Preprocess) -> Tensor:  # noqa: ARG002  # as every source
        """Raise, with the reason."""
        raise DataError(self.reason)


@dataclass(frozen=True)
class ArraySource:
    """A row of a memory-mapped .npy, N×H×W or N×H×W×C in uint8."""

    path: str
    row: int

    @property
    def name(self) -> str:
        """The array's path and the row."""
        return f"{self.path}[{self.row}]"

    def read(self, preprocess: Preprocess) -> Tensor:
        """Return the row's image; grey is repeated if three channels are needed."""
        pixels = torch.from_numpy(np.array(open_array(Path(self.path))[self.row]))
        image = pixels[None] if pixels.dim() == 2 else pixels.permute(2, 0, 1)
        if len(image) == 1:
            image = image.expand(preprocess.channels, -1, -1)
        return preprocess.frame(image[None])[0]


def decode(encoded: bytes, preprocess: Preprocess) -> Tensor:
    """Return an encoded image framed, uint8 C×H×W. An EXIF orientation is left alone, as in most training programs."""
    image_module = pillow()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about metadata of images that decode well
        warnings.simplefilter("error", image_module.DecompressionBombWarning)
        try:
            with image_module.open(io.BytesIO(encoded)) as image:
                if image.mode.startswith(("I", "F")):  # Pillow would clip 16 bits to 8, not scale them
                    raise DataError(f"mode {image.mode} has more than 8 bits a channel")
                if image.mode == "P" and "transparency" in image.info:
                    return preprocess.frame_image(image.convert("RGBA"))
                return preprocess.frame_image(image)
        except image_module.UnidentifiedImageError as error:
            raise DataError("not in a format that Pillow knows") from error
        except image_module.DecompressionBombError as error:
            raise DataError(str(error)) from error


def pillow() -> ModuleType:
    """Return `PIL.Image`; raise with the way to install it."""
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(
            "Pillow is not installed; needed: Pillow, to decode image files. Install it with `pip install "
            "'undrift[images]'`."
        ) from error
    return Image


def open_array(path: Path) -> Images:
    """Return a .npy of images, mapped into memory, never unpickled."""
    try:
        array: Images = np.load(path, mmap_mode="r", allow_pickle=False)
    except BROKEN_ARRAY as error:
        raise DataError(
            f"{path} cannot be read as an array ({error}); needed: a .npy of plain numbers. It may be cut short, or "
            "hold pickled objects, which undrift never loads: write it again with numpy.save."
        ) from error
    if array.dtype != np.uint8 or array.ndim not in (3, 4) or (array.ndim == 4 and array.shape[3] not in (1, 3)):
        raise DataError(
            f"{path} holds {array.dtype} of shape {array.shape}; needed: images as uint8 N×H×W×3, or N×H×W for grey "
            "ones. Convert the array."
        )
    if 0 in array.shape[1:]:
        raise DataError(
            f"{path} holds images without a pixel (shape {array.shape}); needed: a height and a width of 1 or more. "
            "Write it again with numpy.save."
        )
    if array.ndim == 3 and array.shape[2] in (1, 3, 4):
        # Else the rows of one photograph would count as hundreds of grey images, three pixels wide.
        rows, side, width = array.shape
        raise DataError(
            f"{path} holds uint8 of shape {array.shape}: one image of {rows}×{side}, or {rows} grey ones of "
            f"{side}×{width}; needed: a shape that says which. Save array[None{', ..., :3' if width == 4 else ''}] for "
            "one image, array[..., None] for grey ones."
        )
    return array


def is_image(name: str) -> bool:
    """Whether a file of this name counts as an image; hidden files (macOS leaves `._photo.jpg`) do not."""
    return name.lower().endswith(ENDINGS) and not name.rpartition("/")[2].startswith(".")
