"""One JSON file of many results, to which several processes add."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from undrift.system.atomic import write_text
from undrift.system.lock import held

PAUSE = 0.02  # seconds between two looks at a file that another process writes


def gather(place: Path, more: Mapping[str, Any]) -> dict[str, Any]:
    """Add to a file what is new, and return all that it holds; waits while another process does the same."""
    place.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with held(place.with_name(f".{place.name}.lock")) as mine:
            if mine:
                old = json.loads(place.read_text(encoding="utf-8")) if place.is_file() else {}
                both: dict[str, Any] = merged(old, more)
                write_text(place, json.dumps(both, indent=1, ensure_ascii=False) + "\n")
                return both
        time.sleep(PAUSE)


def merged(old: Any, new: Any) -> Any:
    """Return nested dicts as one; the new value where both have one.

    Examples:
        >>> merged({"a": {"x": 1}, "b": 2}, {"a": {"y": 3}, "b": 4})
        {'a': {'x': 1, 'y': 3}, 'b': 4}
    """
    if not (isinstance(old, dict) and isinstance(new, Mapping)):
        return new
    return {**old, **{key: merged(old[key], value) if key in old else value for key, value in new.items()}}
