"""Read the pickled batches of torchvision's CIFAR folders without running any code in them.

A pickle names functions and calls them; an ordinary load would call whatever a tampered file names. Here a name can
only become one of three stand-ins, which store what they are given: no function of numpy or of the system is ever
called. The arrays are built afterwards from the stored bytes.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np

from undrift._errors import DataError

BROKEN_PICKLE = (
    *(pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, IndexError, KeyError),
    *(OverflowError, MemoryError),  # lengths that no file has
)
DTYPES = ("u1", "i1", "i2", "i4", "i8")
Array = np.ndarray[tuple[int, ...], np.dtype[np.integer]]


class _Dtype:
    """What stands for numpy.dtype: the code, and the byte order from its state."""

    __slots__ = ("code", "order")

    def __init__(self, code: Any, *_: Any) -> None:
        self.code, self.order = _text(code), "<"

    def __setstate__(self, state: Any) -> None:
        self.order = _text(state[1])


class _Array:
    """What stands for an array: the state it was pickled with."""

    __slots__ = ("state",)

    def __init__(self, *_: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def build(self) -> Array:
        """Return the array of whole numbers that the state describes."""
        _, shape, dtype, fortran, raw = self.state
        if not isinstance(dtype, _Dtype) or dtype.code not in DTYPES or dtype.order not in ("<", ">", "|", "="):
            raise ValueError("an array that is not of whole numbers")
        flat = np.frombuffer(raw, np.dtype(dtype.order + dtype.code))
        return flat.reshape(tuple(int(length) for length in shape), order="F" if fortran else "C")


class _Encode:
    """What stands for _codecs.encode, by which Python 3 writes bytes into old pickles.

    No function: a pickle may set attributes of what it is given, and those of a function (its defaults) would stay.
    """

    __slots__ = ()

    def __call__(self, text: str, encoding: str) -> bytes:
        if encoding != "latin1":
            raise ValueError(f"bytes written as {encoding}")
        return str(text).encode("latin1")

    def __setstate__(self, state: Any) -> None:
        raise ValueError("it sets attributes of a function")


_STAND_INS: dict[tuple[str, str], Any] = {
    ("_codecs", "encode"): _Encode(),
    ("numpy", "dtype"): _Dtype,
    ("numpy", "ndarray"): _Array,
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _STAND_INS:
            return _STAND_INS[module, name]
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError(f"it asks for an outside object {pid!r}")


def read_batch(path: Path) -> dict[str, Any]:
    """Return a pickled batch as a dict of str to lists, numbers, bytes and arrays; raises on anything else."""
    try:
        with path.open("rb") as file:
            content = _Unpickler(file, encoding="bytes").load()
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}")
        return {_text(key): value.build() if isinstance(value, _Array) else value for key, value in content.items()}
    except BROKEN_PICKLE as error:
        raise DataError(
            f"{path} cannot be read ({str(error) or type(error).__name__}); needed: a CIFAR batch with nothing but "
            "arrays, lists and text, as undrift runs no code from files. Get it again from the authors' page of CIFAR "
            "(python version), or use the binary version."
        ) from error


def _text(value: Any) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)
