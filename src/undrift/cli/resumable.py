"""Keep the files of a stream so that it can be stopped at any moment and resumed.

The state stores how many bytes of the answers belong to it. A resumed stream truncates the file to that length and
answers the rest again, so no line is lost or repeated. A stream always resumes from its own state; --force replaces
another stream's. To start from the beginning, a user deletes the state.

A full file of answers is renamed after a state that counts all its lines, and before a state of the next file. A stream
that was killed in between finds the renamed file, and begins the next.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from undrift._errors import DataError, PerturbationMismatch, UndriftError
from undrift.cli.answer_log import AnswerLog
from undrift.cli.image_arguments import InOrder
from undrift.cli.output_paths import alone
from undrift.cli.session import Session
from undrift.cli.stream_state import Names, Saved, differences, latest, read_state, write_state
from undrift.images import Domain
from undrift.loop.streaming import Stream


@contextmanager
def files_of(
    session: Session,
    answers: Path,
    state: Path | None,
    out: Path | None,
    force: bool,
    most: int | None = None,
    page: Path | None = None,
) -> Iterator["StreamFiles"]:
    """Give the files of a stream for a `with` block, locked against other processes."""
    with alone(state):  # before reading the state, which another process may be writing
        files = StreamFiles(session, answers, state, out, force, most, page)
        try:
            yield files
        finally:
            files.close()


class StreamFiles:
    """Answers, state and domain file of one stream.

    Attributes:
        new: files to write that must not exist without --force.
        going_on: files to write that may exist: this stream's own, judging by their names.
        log: the answers.
        parts: full files of answers that this run moved aside.

    Args:
        most: bytes of a full file of answers; None keeps one file.
    """

    def __init__(
        self,
        session: Session,
        answers: Path,
        state: Path | None,
        out: Path | None,
        force: bool,
        most: int | None,
        page: Path | None,
    ) -> None:
        self.session, self.state, self.force, self.most = session, state, force, most
        self.parts: list[Path] = []
        self._part = 1
        self.log = AnswerLog(answers, state)
        self._out = None if out is None else os.path.realpath(out)
        self._found: Saved | str | None = None
        self._identity: Mapping[str, Any] = {}
        self._names: Names | None = None
        self._written = False
        self.new: tuple[Path | None, ...]
        self.going_on: tuple[Path | None, ...]
        if state is not None and state.exists():
            self._found = read_state(state)
            if isinstance(self._found, Saved):
                self.session.kept = (
                    f"Nothing new was written: {answers} and {state} are as they were, and the same command goes on "
                    "from there."
                )
        ours = isinstance(self._found, Saved) and self._found.out == self._out
        if self._found is None:
            begun = self.log.without_answers  # killed before its first state
            self.new, self.going_on = ((out, state), (answers, page)) if begun else ((out, answers, state, page), ())
        else:
            self.new, self.going_on = ((), (state, answers, out, page)) if ours else ((out,), (state, answers, page))

    def find(self, identity: Mapping[str, Any], images: Domain) -> Saved | None:
        """Return this stream's state, or None to start; raise if that would delete another stream's files."""
        self._identity, self._names = identity, Names(images)
        if self._found is None:
            return None
        problem: UndriftError
        deletes = f"--force, which deletes it and the answers in {self.log.path}."
        if isinstance(self._found, Saved):
            other = differences(self._found, identity, images, self.log.path)
            if not other:
                return self._found
            problem = PerturbationMismatch(
                f"{self.state} is the state of another stream ({'; '.join(other[:3])}); needed: the same network, "
                "options and images; new images may follow the last. Use those, name other files, or give "
                f"{deletes}"
            )
        else:
            problem = DataError(
                f"{self.state} is not the state of a stream ({self._found}); needed: what `undrift stream --state` "
                f"wrote. Name another file, or give {deletes}"
            )
        if not self.force:
            raise problem
        what = str(problem).partition("; needed")[0]
        self.session.note(f"{what}: --force replaces it, and the answers in {self.log.path}")
        return None

    def open(self, saved: Saved | None, images: Domain) -> None:
        """Open the answers, to resume or to start."""
        if saved is None:
            self._part = _next_part(self.log.path)
            self.log.open_new(replace=self.force)
            if self.state is not None:  # another stream's: delete it before its answers
                Path(os.path.realpath(self.state)).unlink(missing_ok=True)
            self.log.start()
            return
        self._part = saved.part
        if (aside := part_of(self.log.path, saved.part)).exists():  # killed before the state of the next file
            with aside.open("rb") as full:
                self.log.compare(full, aside, saved.offset, saved.checksum)
            self.log.open_new(replace=False)
            self.log.begin_empty()
            self._part += 1
        else:
            self.log.go_on(saved.offset, saved.checksum)
        anew = f"; to start over, remove {self.state}" if self.force else ""
        self.session.note(f"going on from {self.state}, after {saved.position:,} of {len(images):,} images{anew}")

    def note(self, left: InOrder, going: Stream, before: Saved | None, write: bool) -> None:
        """Record the stream's progress, and what a stop would leave; with `write`, write the state."""
        files = f"{self.log.path} holds" if self._part == 1 else f"{self.log.path} and the files before it hold"
        answers = f"{files} {going.report.images:,} answers, in whole lines"
        full = self.most is not None and self.log.offset >= self.most and not self.log.empty
        if self.state is None:
            if going.report.images or not self.log.created:  # else `close` removes the file
                self.session.kept = f"{answers}. With --state FILE, a stopped stream can be resumed."
            if full:
                self._turn_over()
        elif write:
            self._write_state(left, going, before)
            if full:
                self._turn_over()
                self._write_state(left, going, before)
            self.session.kept = f"{answers}, and {self.state} the stream's state; the same command goes on from there."

    def _write_state(self, left: InOrder, going: Stream, before: Saved | None) -> None:
        assert self.state is not None
        assert self._names is not None
        self.log.sync()
        where = left.position, self.log.offset, self.log.checksum
        skipped, unreadable = unread(before, left)
        names = self._names.up_to(left.position)
        saved = Saved(
            *where,
            latest(skipped),
            going.state_dict(),
            dict(self._identity),
            names,
            self._out,
            self._part,
            unreadable,
        )
        write_state(self.state, saved)
        self._written = True

    def _turn_over(self) -> None:
        aside = part_of(self.log.path, self._part)
        self.log.turn_over(aside)
        self.log.created = False  # it has a history, and stays
        self.parts.append(aside)
        self._part += 1

    def close(self) -> None:
        """Close the answers; remove a new file without answers that no state refers to."""
        self.log.close(remove=self.log.created and self.log.empty and not self._written)


def unread(before: Saved | None, left: InOrder) -> tuple[dict[str, str], int]:
    """Return the images that could not be read, each with its reason, and how many: of this run and those before it."""
    now = left.skipped()
    if before is None:
        return now, len(now)
    return dict(before.skipped) | now, max(before.unreadable, len(before.skipped)) + len(now)


def part_of(answers: Path, number: int) -> Path:
    """Return the name of a full file of answers."""
    return answers.with_name(f"{answers.stem}.{number:06}{answers.suffix}")


def _next_part(answers: Path) -> int:
    """Return the number that follows those of an earlier stream's files."""
    name = re.compile(rf"{re.escape(answers.stem)}\.(\d{{6}}){re.escape(answers.suffix)}")
    found = [name.fullmatch(path.name) for path in answers.absolute().parent.iterdir()]
    return max((int(match[1]) for match in found if match), default=0) + 1
