"""The command line: `undrift COMMAND`, one file a command. docs/cli.md shows each with an example.

Read `_app.py` first: it names the commands and turns their outcomes into exit codes.
"""

from undrift.cli._app import main

__all__ = ["main"]
