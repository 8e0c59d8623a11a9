"""Run a compiler, and leave what it made at its place: whole or not at all, by one process at a time.

    python compiler.py PLACE COMMAND…

A program of its own, so that it goes on if whoever asked for it ends. It needs nothing but Python.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

DIGEST = hashlib.sha256().digest_size


def sealed(content: bytes) -> bytes:
    """Return a library with a digest behind its end, where no loader looks."""
    return content + hashlib.sha256(content).digest()


def whole(content: bytes) -> bool:
    """Return whether these are all the bytes of a library that was sealed: a part of one would end the process."""
    return len(content) > DIGEST and sealed(content[:-DIGEST]) == content


def main(place: Path, command: list[str]) -> int:
    """Compile, unless another process has meanwhile."""
    import fcntl  # not on every system that imports this

    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if place.exists():
            return 0
        with tempfile.TemporaryDirectory(dir=place.parent) as folder:
            made, seal = Path(folder, "made.so"), Path(folder, "sealed.so")
            done = subprocess.run([*command, "-o", str(made)])  # noqa: S603
            if done.returncode:
                return 1
            with seal.open("wb") as file:
                file.write(sealed(made.read_bytes()))
                file.flush()
                os.fsync(file.fileno())
            seal.replace(place)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
