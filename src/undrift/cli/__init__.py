"""The command line: `undrift COMMAND`, one file per command. docs/reference/cli.md shows each with an example.

Read `app.py` first: it lists the commands and turns their outcomes into exit codes.
"""

from undrift.cli.app import main

__all__ = ["main"]
