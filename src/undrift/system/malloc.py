"""Keep freed memory in the process (glibc), for the command line and for measurements.

A step on a CPU frees hundreds of megabytes. glibc returns the end of the heap to the system, and the next step faults
it in again page by page, which takes up to a tenth of a step. The library does not change the process's settings;
docs/explanation/speed.md explains how to set this yourself.
"""

import ctypes
import os

# mallopt's parameters and their values: free bytes at the end of the heap before any are returned, bytes requested at a
# time, and the largest block taken from the heap (2²⁵ is glibc's own limit).
_TRIM, _PAD, _MAP = (-1, 2**30), (-2, 2**26), (-3, 2**25)
_SET = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed() -> bool:
    """Let glibc keep freed memory and return whether it does; a user's own setting stays."""
    if any(name in os.environ for name in _SET):
        return False
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018  others have a mallopt as well, or none
        return all(library.mallopt(*setting) == 1 for setting in (_TRIM, _PAD, _MAP))
    except (OSError, AttributeError, TypeError):  # no glibc: musl, macOS, Windows
        return False
