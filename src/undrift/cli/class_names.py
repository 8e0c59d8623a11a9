"""Choose the names of a network's classes, in the order of its outputs."""

from pathlib import Path

from undrift._errors import DataError
from undrift.cli.session import Session

Names = tuple[str, ...]
SHOWN = 3
"""How many differing names a warning quotes."""


def choose_classes(
    session: Session, given: Path | None, learned: Names | None, own: Names | None, name: str
) -> Names | None:
    """Return the class names to use: those of --classes, else the domain file's, else the network's own.

    Warn if another list contradicts them: names in the wrong order would mislabel every answer without an error.

    Args:
        given: the file of --classes.
        learned: the names in the domain file.
        own: the names that came with the network or its weights.
        name: the name of the domain file.
    """
    named = None if given is None else read_classes(given)
    theirs = ((f"the domain file {name}", learned), ("the network or its weights", own))
    lists = [(who, names) for who, names in ((f"--classes {given}", named), *theirs) if names]
    if not lists:
        return None
    (first, used), *others = lists
    for who, names in others:
        if lines := _differences(used, names):
            session.warn(
                f"{first} and {who} do not name the same classes: {lines}. The first list is used. Names go by the "
                "order of the outputs, so answers and scores may have wrong names. Correct the names, or leave "
                "--classes out."
            )
            break  # one warning is enough
    return used


def read_classes(path: Path) -> Names:
    """Return the class names in a text file, one per line."""
    try:
        names = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} cannot be read ({getattr(error, 'strerror', None) or error}); needed: a text file with "
            "one class name per line. Check the path."
        ) from error
    if not names or len(set(names)) < len(names):
        twice = next((n for n in names if names.count(n) > 1), None)
        found = "is empty" if twice is None else f"names {twice!r} twice"
        raise DataError(f"{path} {found}; needed: one class name per line, each once. Correct the file.")
    return tuple(names)


def class_name(classes: Names | None, label: int) -> str:
    """Return a label's class name, or its number without names, or "" for a label below 0 (no answer)."""
    if label < 0:
        return ""
    return str(label) if classes is None else classes[label]


def _differences(used: Names, names: Names) -> str:
    """Return in words where two lists differ, or "" if they are equal."""
    if len(used) != len(names):
        return f"{len(used)} against {len(names)} names"
    other = [
        f"output {place} {ours!r} against {theirs!r}"
        for place, (ours, theirs) in enumerate(zip(used, names, strict=True))
        if ours != theirs
    ]
    if not other:
        return ""
    shown = ", ".join(other[:SHOWN]) + (", …" if len(other) > SHOWN else "")
    return f"{shown}; the same names in another order" if sorted(used) == sorted(names) else shown
