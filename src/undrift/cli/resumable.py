"""Keep the files of a stream so that it can be stopped at any moment and resumed.

The state stores how many bytes of the answers belong to it. A resumed stream cuts off what was appended after that and
answers again, so no line is lost or repeated. A stream always resumes from its own state; --force replaces another
stream's. To start anew, a user removes the state.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from undrift._errors import DataError, PerturbationMismatch, UndriftError
from undrift.cli.answer_log import AnswerLog
from undrift.cli.image_arguments import InOrder
from undrift.cli.output_paths import alone
from undrift.cli.session import Session
from undrift.cli.stream_state import Names, Saved, differences, read_state, write_state
from undrift.images import Domain
from undrift.loop.streaming import Stream


@contextmanager
def files_of(
    session: Session, answers: Path, state: Path | None, out: Path | None, force: bool, page: Path | None = None
) -> Iterator["StreamFiles"]:
    """Give the files of a stream for a `with` block, locked against other processes."""
    with alone(state):  # before reading the state, which another process may be writing
        files = StreamFiles(session, answers, state, out, force, page)
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
    """

    def __init__(
        self,
        session: Session,
        answers: Path,
        state: Path | None,
        out: Path | None,
        force: bool,
        page: Path | None = None,
    ) -> None:
        self.session, self.state, self.force = session, state, force
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
            self.log.open_new(replace=self.force)
            if self.state is not None:  # another stream's: delete it before its answers
                Path(os.path.realpath(self.state)).unlink(missing_ok=True)
            self.log.start()
            return
        self.log.go_on(saved.offset, saved.checksum)
        anew = f"; to start anew, remove {self.state}" if self.force else ""
        self.session.note(f"going on from {self.state}, after {saved.position:,} of {len(images):,} images{anew}")

    def note(self, left: InOrder, going: Stream, skipped: Mapping[str, str], write: bool) -> None:
        """Record the stream's progress, and what a stop would leave; with `write`, write the state."""
        answers = f"{self.log.path} holds {going.report.images:,} answers, in whole lines"
        if self.state is None:
            if going.report.images or not self.log.created:  # else `close` removes the file
                self.session.kept = f"{answers}. With --state FILE, a stopped stream can be resumed."
        elif write:
            assert self._names is not None
            self.log.sync()
            where = left.position, self.log.offset, self.log.checksum
            names = self._names.up_to(left.position)
            saved = Saved(*where, dict(skipped), going.state_dict(), dict(self._identity), names, self._out)
            write_state(self.state, saved)
            self._written = True
            self.session.kept = f"{answers}, and {self.state} the stream's state; the same command goes on from there."

    def close(self) -> None:
        """Close the answers; remove a new file without answers that no state refers to."""
        self.log.close(remove=self.log.created and self.log.empty and not self._written)
