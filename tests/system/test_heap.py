"""Freed memory stays with a process of ours: its next step faults no page in again."""

import ctypes
import os
import subprocess
import sys

import pytest

from undrift.system import malloc

# Twenty blocks of four megabytes, as a step's activations, written and freed twice; page faults of the second time.
STEPS = """
import ctypes, resource, sys
import torch
from undrift.system.malloc import keep_freed

ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: one fault a page, also where huge pages are always on
kept = keep_freed() if sys.argv[1] == "kept" else False
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(1 << 20) for _ in range(20)]
    del blocks
print(int(kept), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
NOT_GLIBC = not (sys.platform == "linux" and hasattr(ctypes.CDLL(None), "gnu_get_libc_version"))


def faults(how: str, **environment: str) -> tuple[int, int]:
    own = {name: value for name, value in os.environ.items() if name not in malloc._SET} | environment
    asked = [sys.executable, "-c", STEPS, how]
    found = subprocess.run(asked, capture_output=True, text=True, check=True, env=own)
    kept, count = found.stdout.split()
    return int(kept), int(count)


@pytest.mark.slow
@pytest.mark.skipif(NOT_GLIBC, reason="no glibc here")
def test_a_step_faults_no_page_in_again() -> None:
    pages = 20 * (4 << 20) // os.sysconf("SC_PAGE_SIZE")
    assert faults("as it comes") > (0, pages // 2)
    kept, count = faults("kept")
    assert kept == 1
    assert count < pages // 8  # a block or two may find no place among the old ones


@pytest.mark.slow
@pytest.mark.skipif(NOT_GLIBC, reason="no glibc here")
def test_what_a_user_has_set_stays() -> None:
    assert faults("kept", MALLOC_TRIM_THRESHOLD_="131072")[0] == 0


def test_nothing_happens_without_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    assert not malloc.keep_freed()
