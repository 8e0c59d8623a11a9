"""Freed memory that stays with the process, for processes of our own: the command line's, and those that measure.

A step on a CPU frees hundreds of megabytes, and glibc gives what lies at the end of the heap back to the system, which
hands it out again, page by page, each filled with zeros: up to a tenth of a step. Another program's process is not
ours to change; docs/speed.md says how it can be asked for.
"""

import ctypes
import os

# mallopt's numbers, and what it is asked for: bytes free at the end of the heap before any are given back, bytes asked
# for at a time, and up to which size memory is the heap's at all (2²⁵ is glibc's own limit).
_TRIM, _PAD, _MAP = (-1, 2**30), (-2, 2**26), (-3, 2**25)
_SET = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed() -> bool:
    """Let glibc keep what is freed, and return whether it does; where a user has set it by hand, that stays."""
    if any(name in os.environ for name in _SET):
        return False
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018  others have a mallopt as well, or none
        return all(library.mallopt(*setting) == 1 for setting in (_TRIM, _PAD, _MAP))
    except (OSError, AttributeError, TypeError):  # no glibc: musl, macOS, Windows
        return False
