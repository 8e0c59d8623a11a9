"""Command-line options made from a dataclass: one a field, with its help line and default.

Values stay text on the way in, so that the dataclass itself says what is wrong with them, all at once.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Annotated, Any, Literal, Optional, get_args, get_origin, get_type_hints

import typer

Run = Callable[..., Any]


def flag(default: Any, help: str, metavar: str | None = None) -> Any:  # noqa: A002
    """Return a dataclass field for the command line: its help line and the word that stands for its value."""
    return dataclasses.field(default=default, metadata={"help": help, "metavar": metavar})


def takes(
    group: type, into: str, panel: str, *, names: Mapping[str, str] | None = None, skip: tuple[str, ...] = ()
) -> Callable[[Run], Run]:
    """Give a command an option for each field of a dataclass; it gets those that were given as a dict.

    Args:
        into: the command's argument that the dict is handed to.
        panel: the heading over these options in the help.
        names: second names of some options: {"adapt_lr": "--lr"}.
        skip: fields that get no option here.
    """
    hints = get_type_hints(group)
    made = [f for f in dataclasses.fields(group) if f.name not in skip]

    def decorate(run: Run) -> Run:
        @wraps(run)
        def with_flags(**given: Any) -> Any:
            values = {f.name: given.pop(f.name) for f in made}
            chosen = {n: _value(v, hints[n]) for n, v in values.items() if v is not None and v != []}
            return run(**given, **{into: chosen})

        extra = [_parameter(f, hints[f.name], panel, (names or {}).get(f.name)) for f in made]
        return signed(with_flags, [p for p in parameters_of(run) if p.name != into] + extra)

    return decorate


def parameters_of(run: Run) -> list[inspect.Parameter]:
    """Return a command's parameters with their types, as typer will read them."""
    hints = get_type_hints(run, include_extras=True)
    parameters = inspect.signature(run).parameters.values()
    return [p.replace(annotation=hints.get(p.name, p.annotation)) for p in parameters]


def signed(run: Run, parameters: list[inspect.Parameter]) -> Run:
    """Return a function that says it takes these parameters, all by name."""
    named = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    # A file is read in as many ways as there are readers: typer looks at both.
    run.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in named}
    return run


def _parameter(f: "dataclasses.Field[Any]", hint: Any, panel: str, second: str | None) -> inspect.Parameter:
    option = "--" + f.name.replace("_", "-")
    shown: dict[str, Any] = {
        "help": _sentence(f.metadata["help"]),
        "rich_help_panel": panel,
        "show_default": _default(f.default),
    }
    if hint is bool:
        annotation: Any = Annotated[Optional[bool], typer.Option(f"{option}/--no-{option[2:]}", **shown)]  # noqa: UP045
        return inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
    kind = Optional[list[str]] if get_origin(hint) is tuple else Optional[str]  # noqa: UP045
    metavar = f.metadata.get("metavar") or _metavar(hint)
    declared = (option,) if second is None else (option, second)
    annotation = Annotated[kind, typer.Option(*declared, metavar=metavar, **shown)]
    return inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _metavar(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "|".join(get_args(hint))
    if hint is int or int in get_args(hint):
        return "N"
    return "NUMBER" if hint is float else "TEXT"


def _default(value: Any) -> str | bool:
    if value is None or value == () or value == "":
        return False
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


def _value(given: Any, hint: Any) -> Any:
    """Return a number where one is meant and given; any other text goes on as it is, to be refused with the rest."""
    if isinstance(given, list):
        return tuple(given)
    kinds = (hint, *get_args(hint))
    for kind in (int, float):
        if kind in kinds and isinstance(given, str):
            try:
                return kind(given)
            except ValueError:
                continue
    return given
