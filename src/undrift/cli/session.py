"""What every command has in common: where it prints, what it does with warnings, and how it ends.

A command returns its result as plain values; `--json` prints that as one object on stdout, and everything for people
goes to stderr. Errors of ours print their three facts, without a traceback.
"""

import errno
import inspect
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import IO, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from undrift._errors import DataError, OptionError, UndriftError, UndriftWarning
from undrift.cli.app import ERROR, INTERRUPTED, OK, USAGE
from undrift.cli.flags import parameters_of, signed
from undrift.cli.wording import in_shell

Run = Callable[..., Mapping[str, Any] | None]
NOBODY_THERE = (errno.EPIPE, errno.EIO)
"""What printing to a closed pipe, and to a closed terminal, raises."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise it, as rich before 13.8 does; later ones end the process, and close stdout where stderr was meant."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class Session:
    """One run of a command.

    Attributes:
        as_json: print one JSON object on stdout, and nothing else there.
        quiet: draw no progress bar.
        warnings: what was said loudly so far.
        kept: what Ctrl-C would leave behind, in words; commands change it as they go.
        unread: whether what is printed got lost (a closed pipe or terminal, a full disk); the command goes on, as files
            may be left to write.
    """

    def __init__(self, as_json: bool, quiet: bool) -> None:
        self.as_json, self.quiet = as_json, quiet
        self.warnings: list[str] = []
        self.kept = "Nothing was written."
        self.unread = False
        # Made now, as tests and pipes put other files in the place of stdout.
        self._people = _Console(stderr=as_json, highlight=False, soft_wrap=True)
        self._aside = _Console(stderr=True, highlight=False, soft_wrap=True)

    def say(self, text: str, style: str = "") -> None:
        """Print a result for people."""
        self._print(self._people, text, style)

    def note(self, text: str, style: str = "") -> None:
        """Print something beside the result: to stderr, always."""
        self._print(self._aside, text, style)

    def warn(self, text: str) -> None:
        """Say something loudly, and remember it for the JSON object."""
        self.warnings.append(text)
        self.note(f"warning: {text}", "bold yellow")

    def wrote(self, path: Path) -> str:
        """Say that a file was written, with its size, and return its name."""
        size = path.stat().st_size
        self.say(f"{path}: {size:,} bytes")
        return str(path)

    def finish(self, result: Mapping[str, Any] | None) -> None:
        """Print the JSON object, if one was asked for."""
        if self.as_json:
            self._print_json(_plain({**(result or {}), "warnings": self.warnings}))

    def fail(self, kind: str, message: str) -> None:
        """Print an error: three facts for people, and the same as JSON."""
        message = in_shell(message)
        self.note(f"{kind}: {message}", "bold red" if kind != "stopped" else "bold")
        if self.as_json:
            self._print_json({"error": kind, "message": message, "warnings": self.warnings})

    def put(self, text: str) -> None:
        """Print to stdout as it is: what a program reads."""
        with self._printing(sys.stdout):
            print(text, end="", flush=True)

    def _print(self, console: Console, text: str, style: str) -> None:
        with self._printing(console.file):
            console.print(Text(text, style=style))

    def _print_json(self, values: Any) -> None:
        text = json.dumps(values, ensure_ascii=False, allow_nan=False)
        try:
            text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
        except UnicodeEncodeError:  # a path with "?" in it would be another path
            text = json.dumps(values, allow_nan=False)
        self.put(text + "\n")

    @contextmanager
    def _printing(self, stream: IO[str]) -> Iterator[None]:
        """Take note where a stream takes no more, and send what is still printed there nowhere."""
        try:
            yield
        except OSError as error:
            self.unread = True
            _silence(stream)
            if error.errno not in NOBODY_THERE and stream is not self._aside.file:
                self.note(
                    f"DataError: what was to be printed could not be written ({error.strerror or error}); needed: room "
                    "for it. The command goes on with its files. Free some space, or print elsewhere.",
                    "bold red",
                )

    @contextmanager
    def hearing_warnings(self) -> Iterator[None]:
        """Print our warnings as they come, each once; Python's others stay as they are."""
        with warnings.catch_warnings():
            shown = warnings.showwarning

            def show(message: Warning | str, category: type[Warning], *rest: Any) -> None:
                if not issubclass(category, UndriftWarning):
                    shown(message, category, *rest)
                elif (text := in_shell(str(message))) not in self.warnings:
                    self.warn(text)

            warnings.simplefilter("always", UndriftWarning)
            # PyTorch's, of a pickle that it is about to refuse: our three facts follow.
            warnings.filterwarnings("ignore", message="Detected pickle protocol")
            warnings.showwarning = show  # type: ignore[assignment]
            yield


def command(run: Run) -> Callable[..., int]:
    """Turn a function of a session into a command that returns an exit code, with `--json` and `--quiet`."""

    @wraps(run)
    def with_session(as_json: bool, quiet: bool, **given: Any) -> int:
        session = Session(as_json, quiet)
        with session.hearing_warnings():
            try:
                session.finish(run(session=session, **given))
                return ERROR if session.unread else OK
            except (KeyboardInterrupt, Exception) as error:
                return _end(session, error)

    flags: list[inspect.Parameter] = [
        _switch("as_json", "--json", "Print one JSON object on stdout; all else goes to stderr."),
        _switch("quiet", "--quiet", "Draw no progress bar."),
    ]
    return signed(with_session, [p for p in parameters_of(run) if p.name != "session"] + flags)


def _switch(name: str, option: str, help_line: str) -> inspect.Parameter:
    annotation = Annotated[bool, typer.Option(option, help=help_line)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=annotation)


def _end(session: Session, error: BaseException) -> int:
    """Say why a command ended early and return its exit code; what only a bug could raise is raised again."""
    if isinstance(error, KeyboardInterrupt):
        session.fail("stopped", session.kept)
        return INTERRUPTED
    if isinstance(error, OptionError):
        session.fail("OptionError", str(error))
        return USAGE
    if isinstance(error, UndriftError):
        session.fail(type(error).__name__, str(error))
        return ERROR
    if isinstance(error, BrokenPipeError) or getattr(error, "errno", None) == errno.EPIPE:
        _silence(sys.stdout)  # whoever read our output has had enough
        return ERROR
    if isinstance(error, OSError):
        session.fail("DataError", str(_of_system(error)))
        return ERROR
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        session.fail("OutOfMemory", f"{_first_line(error)}; the batch did not fit. Lower --batch-size. {session.kept}")
        return ERROR
    raise error


def _silence(stream: IO[str]) -> None:
    """Send a stream nowhere; else Python would complain of what it still holds once more while it shuts down."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _of_system(error: OSError) -> DataError:
    what = error.strerror or str(error)
    where = f"{error.filename}: " if error.filename else ""
    return DataError(
        f"{where}{what}; needed: files that can be read and written. Check the path, the disk, the rights."
    )


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")


def _plain(value: Any) -> Any:
    """Return a value as JSON can hold it: numbers that are not finite become null, paths become text."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, str | bool | int) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    return [_plain(v) for v in value]
