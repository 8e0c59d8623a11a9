"""Output, warnings, errors and exit codes of all commands.

A command returns its result as plain values. With `--json` they become one JSON object on stdout, and all other output
goes to stderr. Errors of undrift are printed without a traceback.
"""

import errno
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.text import Text

from undrift._errors import DataError, OptionError, UndriftError, UndriftWarning
from undrift.cli.app import ERROR, INTERRUPTED, OK, USAGE
from undrift.cli.flags import help_all, parameters_of, signed, switch
from undrift.cli.torchrun import Crew, refuse_many

Run = Callable[..., Mapping[str, Any] | None]
NOBODY_THERE = (errno.EPIPE, errno.EIO)
"""Errors of printing to a closed pipe or a closed terminal."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise the error as rich before 13.8 does; later versions end the process, and close stdout for stderr."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class Session:
    """One run of a command.

    Attributes:
        as_json: print one JSON object on stdout, and nothing else there.
        quiet: draw no progress bar.
        warnings: the warnings so far.
        kept: what Ctrl-C would leave behind, as a sentence; commands update it.
        code: what the command ends with where nothing else goes wrong.
        unread: whether printing failed (a closed pipe or terminal, a full disk). The command continues, because it may
            have files to write.
        crew: the processes that run this command; the first prints for all.
    """

    def __init__(self, as_json: bool, quiet: bool) -> None:
        self.crew = Crew()
        self.as_json, self.quiet = as_json, quiet or not self.crew.first
        self.warnings: list[str] = []
        self.kept = "Nothing was written."
        self.code = OK
        self.unread = False
        self._silent = not self.crew.first
        # Created per command, because tests and pipes replace stdout.
        self._people = _Console(stderr=as_json, highlight=False, soft_wrap=True)
        self._aside = _Console(stderr=True, highlight=False, soft_wrap=True)

    def say(self, text: str, style: str = "") -> None:
        """Print a result for people."""
        self._print(self._people, text, style)

    def note(self, text: str, style: str = "") -> None:
        """Print a remark to stderr."""
        self._print(self._aside, text, style)

    def warn(self, text: str) -> None:
        """Print a warning, and keep it for the JSON object."""
        self.warnings.append(text)
        self.note(f"warning: {text}", "bold yellow")

    def wrote(self, path: Path) -> str:
        """Print a written file's name and size, and return the name."""
        size = path.stat().st_size
        self.say(f"{path}: {size:,} bytes")
        return str(path)

    def finish(self, result: Mapping[str, Any] | None) -> None:
        """Print the JSON object, if one was asked for."""
        if self.as_json:
            self._print_json(_plain({**(result or {}), "warnings": self.warnings}))

    def fail(self, kind: str, message: str) -> None:
        """Print an error, for people and as JSON."""
        self._silent = not self.crew.tells_first()
        message = in_shell(message)
        if self.crew.count > 1 and kind != "stopped":
            message = f"process {self.crew.rank} of {self.crew.count}: {message}"
        self.note(f"{kind}: {message}", "bold red" if kind != "stopped" else "bold")
        if self.as_json:
            self._print_json({"error": kind, "message": message, "warnings": self.warnings})

    def put(self, text: str) -> None:
        """Print text for programs to stdout, unchanged."""
        if self._silent:
            return
        with self._printing(sys.stdout):
            print(text, end="", flush=True)

    def _print(self, console: Console, text: str, style: str) -> None:
        if self._silent:
            return
        with self._printing(console.file):
            console.print(Text(text, style=style))

    def _print_json(self, values: Any) -> None:
        text = json.dumps(values, ensure_ascii=False, allow_nan=False)
        try:
            text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
        except UnicodeEncodeError:  # escape instead: "?" would make it another path
            text = json.dumps(values, allow_nan=False)
        self.put(text + "\n")

    @contextmanager
    def _printing(self, stream: IO[str]) -> Iterator[None]:
        """Note a stream that cannot be written to, and discard what is still printed there."""
        try:
            yield
        except OSError as error:
            self.unread = True
            _silence(stream)
            if error.errno not in NOBODY_THERE and stream is not self._aside.file:
                self.note(
                    f"DataError: the output could not be written ({error.strerror or error}); needed: room for it. "
                    "The command still writes its files. Free some space, or print elsewhere.",
                    "bold red",
                )

    @contextmanager
    def hearing_warnings(self) -> Iterator[None]:
        """Print each of undrift's warnings once; leave other warnings to Python."""
        with warnings.catch_warnings():
            shown = warnings.showwarning

            def show(message: Warning | str, category: type[Warning], *rest: Any) -> None:
                if not issubclass(category, UndriftWarning):
                    shown(message, category, *rest)
                elif (text := in_shell(str(message))) not in self.warnings:
                    self.warn(text)

            warnings.simplefilter("always", UndriftWarning)
            # PyTorch warns before it refuses a pickle; our error follows.
            warnings.filterwarnings("ignore", message="Detected pickle protocol")
            warnings.showwarning = show  # type: ignore[assignment]
            yield


def command(run: Run) -> Callable[..., int]:
    """Turn a function of a session into a command with an exit code, `--json`, `--quiet` and `--help-all`."""

    @wraps(run)
    def with_session(as_json: bool, quiet: bool, help_all: bool, **given: Any) -> int:
        del help_all  # its callback has printed the help and ended the command
        session = Session(as_json, quiet)
        with session.hearing_warnings():
            try:
                refuse_many(run.__module__.rpartition(".")[2])
                session.finish(run(session=session, **given))
                return ERROR if session.unread else session.code
            except (KeyboardInterrupt, Exception) as error:
                return _end(session, error)

    own = [p for p in parameters_of(run) if p.name != "session"]
    flags = [
        switch("as_json", "--json", "Print one JSON object on stdout, all else on stderr.", hidden=True),
        switch("quiet", "--quiet", "Draw no progress bar.", hidden=True),
        help_all(own),
    ]
    return signed(with_session, own + flags)


def _end(session: Session, error: BaseException) -> int:
    """Print why a command ended early and return its exit code; raise again what only a bug can cause."""
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
        _silence(sys.stdout)  # the reader of our output has closed it
        return ERROR
    if isinstance(error, OSError):
        session.fail("DataError", str(_of_system(error)))
        return ERROR
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        session.fail("OutOfMemory", f"{_first_line(error)}; the batch did not fit. Lower --batch-size. {session.kept}")
        return ERROR
    session.crew.tells_first()  # Python prints it, with its traceback
    raise error


def _silence(stream: IO[str]) -> None:
    """Redirect a stream to the null device, so that Python does not fail on its buffer at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _of_system(error: OSError) -> DataError:
    what = error.strerror or str(error)
    where = f"{error.filename}: " if error.filename else ""
    return DataError(
        f"{where}{what}; needed: files that can be read and written. Check the path, the disk and the permissions."
    )


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")


def _plain(value: Any) -> Any:
    """Return a value as JSON: numbers that are not finite become null, paths become text."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, str | bool | int) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    return [_plain(v) for v in value]


ON_THE_SHELL = {
    "`help(undrift.Options)`": "`--help-all`",
    "`help(undrift_bench.train.TrainOptions)`": "`--help-all`",
    "export(model, path, images=…)": "`undrift export … --images FOLDER`",
    "`skipped` names them all.": "With --json they are all named, as `skipped`.",
    "samples=0 asks": "--samples 0 asks",
    "samples=1 or more": "--samples 1 or more",
    ", and write it again.": ", and run the same command again.",
    "With checkpoint=…": "With --checkpoint FILE",
    "Call adapt again with checkpoint=": "Give the same command again, with --checkpoint ",
    'format="torch.export"': "--format torch.export",
    'norm_statistics="moving"': "--norm-statistics moving",
    'norm_statistics="train"': "--norm-statistics train",
    "stream(…, gather=64)": "--gather 64",
    "Give episodic=False, or leave gather out.": "Give --no-episodic, or leave --gather out.",
    "balanced=True was given without gather;": "--balanced was given without --gather;",
    "Give gather=128 as well.": "Give --gather 128 as well.",
    "resume=False": "--no-resume",
    "Name it: trunk='resnet50.safetensors'": "Name it: --trunk FILE",
    "Lower batch_size to": "Lower --batch-size to",
    "Lower lr (it was": "Lower --lr (it was",
    "Use device='cpu'": "Use --device cpu",
    "Use device='auto'": "Use --device auto",
    "Set `resize`, or leave `crop` out.": "Set --resize, or --crop none.",
}
"""Parts of the library's messages and their replacements; a test checks that the library still says them."""


def in_shell(text: str) -> str:
    """Return a message of the library with advice for the command line.

    Examples:
        >>> in_shell("beta=2 is above 1. `help(undrift.Options)` lists every option.")
        'beta=2 is above 1. `--help-all` lists every option.'
    """
    for python, shell in ON_THE_SHELL.items():
        text = text.replace(python, shell)
    return text
