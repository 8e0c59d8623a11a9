"""Find the user's line, for warnings that arise deep inside a call."""

import sys

_OURS = ("undrift", "torch", "contextlib")


def callers_level() -> int:
    """Return the `stacklevel` with which `warnings.warn`, called beside this, names the first line of other code."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
        level, frame = level + 1, frame.f_back
    return level
