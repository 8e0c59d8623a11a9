"""No test is skipped silently: a reason that is on no list is a failure, and what needs a GPU is named."""

import subprocess
import sys
from pathlib import Path

TESTS = """
import pytest

@pytest.mark.skipif(True, reason={reason!r})
def test_by_mark(): ...

def test_by_call():
    pytest.skip({reason!r})

@pytest.mark.xfail(reason="known to fail")
def test_that_may_fail():
    assert False
"""


def run(folder: Path, reason: str) -> str:
    (folder / "test_it.py").write_text(TESTS.format(reason=reason))
    words = ["-m", "pytest", "-p", "skips", "-c", "/dev/null", "--rootdir", str(folder), "-q", str(folder)]
    environment = {"PYTHONPATH": str(Path(__file__).with_name("support"))}
    return subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, check=False).stdout


def test_an_unknown_reason_to_skip_is_a_failure(tmp_path: Path) -> None:
    out = run(tmp_path, "too slow for me")
    assert "1 failed, 1 xfailed, 1 error" in out  # a mark skips in setup: an error there
    assert "too slow for me: no known reason to skip a test" in out


def test_what_needs_a_gpu_is_named_at_the_end(tmp_path: Path) -> None:
    out = run(tmp_path, "no GPU here")
    assert "NOT RUN: there is no such GPU here" in out
    assert "    2  test_it.py" in out
    assert "2 skipped, 1 xfailed" in out
