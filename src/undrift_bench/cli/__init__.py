"""The command `undrift-bench`: benchmarks by name, source training, and the demo."""

import sys
from collections.abc import Sequence

HELP = """Usage: undrift-bench COMMAND [OPTIONS]

  list      Name the benchmarks.
  NAME      Run a benchmark: the same as `undrift bench NAME`.
  train     Train a source model: the same as `undrift train`.
  demo      Adapt a digit network to scans of another kind.

Each has --help. Without a command the benchmarks are named."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] in (["--help"], ["-h"]):
        print(HELP)
        return 0
    if words[:1] == ["demo"]:
        from undrift_bench.demo.__main__ import main as demo

        return demo(words[1:])
    from undrift.cli import main as undrift

    if words[:1] not in (["bench"], ["train"]):
        words = ["bench", *words]
    if arguments is not None:
        return undrift(words)
    sys.argv[1:] = words  # without arguments, undrift knows that the process is its own
    return undrift()
