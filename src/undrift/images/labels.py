"""Read labels for an array of images: a .npy of integers."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from undrift._errors import DataError
from undrift.images.sources import BROKEN_ARRAY

Array = NDArray[Any]


def read_labels(path: Path) -> Array:
    """Return a .npy of labels, never unpickled."""
    try:
        labels: Array = np.load(path, allow_pickle=False)
    except BROKEN_ARRAY as error:
        raise DataError(
            f"{path} cannot be read ({error}); needed: a .npy of whole numbers, one label per image. Copy it again, "
            "or save it again: numpy.save(path, labels.astype(int))."
        ) from error
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        kind = "text" if labels.dtype.kind in "US" else str(labels.dtype)
        raise DataError(
            f"{path} holds {kind} of shape {labels.shape}; needed: integers of shape (N,), the number of each image's "
            f"class. {_convert(labels)}"
        )
    return labels


def _convert(labels: Array) -> str:
    """Return how labels of another kind become numbers of classes."""
    if labels.dtype.kind in "US":
        return "Replace each name by its place in the network's class names, from 0 on."
    turned = "labels.argmax(1)" if labels.ndim == 2 and labels.shape[1] > 1 else "labels.reshape(-1).astype(int)"
    return f"Convert them: numpy.save(path, {turned})."
