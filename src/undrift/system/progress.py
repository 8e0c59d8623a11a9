"""A progress bar with numbers, on terminals only."""

import contextlib
import sys
from types import TracebackType
from typing import IO, Any, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text


class Bar:
    """Show how far a loop is and its latest numbers; print nothing to a log file or a pipe.

    A terminal that is closed meanwhile does not end the loop.

    Examples:
        >>> with Bar("adapt", total=2, shown=False) as bar:
        ...     bar.advance(loss=0.5, epoch="1/15")
    """

    def __init__(self, what: str, total: int | None, shown: bool | None = None, done: int = 0) -> None:
        # On stderr, because another program may read stdout.
        terminal = _Terminal()
        visible = terminal.isatty() if shown is None or sys.stderr is None else shown
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24, table_column=Column(no_wrap=True)),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeRemainingColumn(),
            _Numbers(),
        )
        self._progress = Progress(*columns, console=Console(file=cast(IO[str], terminal)), disable=not visible)
        self._task = self._progress.add_task(what, total=total, completed=done, numbers="")

    def __enter__(self) -> "Bar":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def advance(self, steps: int = 1, /, **numbers: float | str) -> None:
        """Move on and show these numbers."""
        shown = "  ".join(f"{name} {_short(value)}" for name, value in numbers.items())
        self._progress.update(self._task, advance=steps, numbers=shown)

    def say(self, what: str) -> None:
        """Change the words before the bar."""
        self._progress.update(self._task, description=what)


class _Numbers(ProgressColumn):
    """The latest numbers, cut where the terminal ends: the bar keeps its width."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["numbers"], no_wrap=True, overflow="ellipsis")


class _Terminal:
    """stderr that does not raise once it is closed.

    Catching errors around rich's calls is not enough: it also writes from its own thread, and a failure half-way would
    leave sys.stderr replaced.
    """

    def __init__(self) -> None:
        self._file: Any = getattr(sys.stderr, "rich_proxied_file", sys.stderr)  # None where stderr is closed

    def isatty(self) -> bool:
        return self._file is not None and bool(self._file.isatty())

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _short(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"
