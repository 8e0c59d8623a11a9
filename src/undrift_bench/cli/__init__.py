"""`undrift-bench NAME …` runs a benchmark; it is `undrift bench NAME …` under a name of its own."""

import sys


def main() -> int:
    """Run one benchmark and return its exit code."""
    from undrift.cli import main as undrift

    sys.argv[1:1] = ["bench"]
    return undrift()
