"""Jobs that several processes share through a folder: each is done once, by whoever comes first."""

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from undrift.system.atomic import write_text
from undrift.system.lock import held

PAUSE = 0.2  # seconds between two looks for something to do


@dataclass(frozen=True)
class SharedJob:
    """Something that is done once; a file of its name says so.

    Attributes:
        do: returns what came of it, in one line.
        needs: jobs that have to be done before.
        files: that have to be there.
    """

    name: str
    do: Callable[[], str]
    needs: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()


class SharedJobs:
    """The jobs of a folder, in an order in which none needs a later one.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     jobs = SharedJobs(Path(folder), [SharedJob("a", lambda: "1"), SharedJob("b", lambda: "2", ("a",))])
        ...     jobs.work(seconds=60, say=lambda line: None)
        ...     jobs.done("a"), jobs.done("b"), jobs.failed("a")
        (True, True, False)
    """

    def __init__(self, folder: Path, jobs: Sequence[SharedJob]) -> None:
        self.folder, self.jobs = folder, jobs
        folder.mkdir(parents=True, exist_ok=True)

    def done(self, name: str) -> bool:
        """Return whether a job has been done."""
        return (self.folder / f"{name}.done").is_file()

    def failed(self, name: str) -> bool:
        """Return whether a job failed; delete its file for another try."""
        return (self.folder / f"{name}.failed").is_file()

    def work(self, seconds: float, say: Callable[[str], None] = print) -> None:
        """Do the first job that is ready, until none is left; after so many seconds, begin no more."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and (left := self._left()):
            ready = (job for job in left if all(map(self.done, job.needs)) and all(f.is_file() for f in job.files))
            if not any(self._taken(job, say) for job in ready):
                time.sleep(PAUSE)

    def _left(self) -> list[SharedJob]:
        """Return the jobs that are not done, and need none that failed."""
        left, lost = list[SharedJob](), set[str]()
        for job in self.jobs:
            if self.failed(job.name) or lost.intersection(job.needs):
                lost.add(job.name)
            elif not self.done(job.name):
                left.append(job)
        return left

    def _taken(self, job: SharedJob, say: Callable[[str], None]) -> bool:
        """Do a job, unless another process does it, or has done it meanwhile."""
        with held(self.folder / f"{job.name}.lock") as mine:
            if not mine or self.done(job.name) or self.failed(job.name):
                return False
            begun, ending = time.monotonic(), "done"
            try:
                said = job.do()
            except Exception as error:  # one job's trouble must not cost the others
                ending, said = "failed", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
            line = f"{job.name} ({time.monotonic() - begun:.1f} s): {said}"
            write_text(self.folder / f"{job.name}.{ending}", line + "\n")
            say(line)
            return True
