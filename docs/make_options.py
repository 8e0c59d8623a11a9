"""Write docs/reference/options.md from the Options dataclass: `python docs/make_options.py`."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from undrift.options import GROUPS, PRESETS, Options, fields_by_group

INTRODUCTION = """\
# Options

The API, the command line and the domain file share one dataclass, `undrift.Options`. Start from a preset and
change single values: `undrift.perturb(net, "released", estimator="drawn")`. On the command line
`init_fraction` is `--init-fraction`. Why the defaults are what they are:
[the defaults, measured](../explanation/defaults.md).

This page is written by `docs/make_options.py`.
"""


def page() -> str:
    """Return the page as Markdown: the options that matter first, then every group."""
    main = [field for field in dataclasses.fields(Options) if field.metadata["main"]]
    parts = [INTRODUCTION, "## The ten that matter first\n", _table(main)]
    for group, fields in fields_by_group().items():
        parts += [f"## {group.capitalize()}: {GROUPS[group]}\n", _table(fields)]
    return "\n".join(parts)


def _table(fields: "Iterable[dataclasses.Field[Any]]") -> str:
    hints = get_type_hints(Options)
    lines = [
        "| option | values | " + " | ".join(f'"{name}"' for name in PRESETS) + " | what it is |",
        "|---|---|" + "---|" * len(PRESETS) + "---|",
    ]
    for field in fields:
        hint = hints[field.name]
        choices = ", ".join(get_args(hint)) if get_origin(hint) is Literal else _type(hint)
        values = " | ".join(_show(getattr(options, field.name)) for options in PRESETS.values())
        lines.append(f"| `{field.name}` | {choices} | {values} | {field.metadata['help']} |")
    return "\n".join(lines) + "\n"


def _type(hint: object) -> str:
    names = {int: "whole number", float: "number", bool: "True, False"}
    if hint in names:
        return names[hint]  # type: ignore[index]
    return "names" if get_origin(hint) is tuple else f"{names[get_args(hint)[0]]} or None"


def _show(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(f"`{v}`" for v in value) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    (Path(__file__).parent / "reference" / "options.md").write_text(page(), encoding="utf-8")
