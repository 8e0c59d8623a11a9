"""Fail a test that is skipped for a reason nobody knows, and list what needs a GPU where there is none."""

import re
from collections import Counter

import pytest

KNOWN = {
    "no GPU": r"\bGPU\b",
    "no real data": r"shared/data|test images are not at",
    "no Triton": r"Triton|interpreter",
    "no browser": r"no browser: Chromium",
    "a package that only extras bring": r"could not import|needs the extra|imagecorruptions|need Pillow",
    "another platform": r"/dev/full|pseudo-terminals|SIGKILL|fork|pipes|glibc|Linux|such locks|such handlers|real one",
    "another PyTorch": r"this PyTorch|its compiler",
}


def known(reason: str) -> str | None:
    """Return what kind of reason for skipping this is, None where it is of no known kind."""
    return next((kind for kind, pattern in KNOWN.items() if re.search(pattern, reason)), None)


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    return report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)


def _checked(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a report of a test that was skipped for an unknown reason into a failure."""
    if report.skipped and not hasattr(report, "wasxfail") and known(_reason(report)) is None:
        report.outcome = "failed"
        report.longrepr = f"{_reason(report)}: no known reason to skip a test. Known: {', '.join(KNOWN)} (skips.py)."


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):  # type: ignore[no-untyped-def]
    report = yield
    _checked(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector):  # type: ignore[no-untyped-def]
    report = yield
    _checked(report)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which files have tests that only a GPU can run."""
    skipped = [r for r in terminalreporter.stats.get("skipped", []) if known(_reason(r)) == "no GPU"]
    if not skipped:
        return
    terminalreporter.section("NOT RUN: there is no such GPU here", sep="!", yellow=True)
    for file, count in sorted(Counter(r.nodeid.partition("::")[0] for r in skipped).items()):
        terminalreporter.line(f"{count:5d}  {file}")
    terminalreporter.line(f"{len(skipped):5d}  tests in all; run `make test-all` on a machine with an NVIDIA GPU")
