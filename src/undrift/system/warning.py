"""Warn at the user's line, however deep inside a call the reason shows."""

import sys
import warnings

from undrift._errors import UndriftWarning

_OURS = ("undrift", "torch", "contextlib")


def warn(text: str) -> None:
    """Give an `UndriftWarning` that names the first line outside undrift and PyTorch."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, UndriftWarning, stacklevel=level)
